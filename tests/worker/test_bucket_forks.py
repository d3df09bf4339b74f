"""Jobs that start from another job's checkpoint in a bucket, with real ranks and real servers."""

import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from aiohttp import web

from grpo_worker.checkpointing import attempts
from grpo_worker.checkpointing.fork import Fork
from grpo_worker.checkpointing.store import complete_steps
from grpo_worker.common.store_path import StorePath
from support.google_store import google_server
from support.object_store import ObjectServer, s3_server
from support.objects import job, spec_of
from support.ranks.launcher import run as run_on_ranks
from support.store_proxy import faulty

TP2_EP2 = {"tensor": 2, "expert": 2, "expert_tensor": 1}
SOURCE = "source"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[s3_server, google_server], ids=["s3", "gs"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ObjectServer]:
    with request.param(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture(scope="module")
def saved(server: ObjectServer) -> list[Any]:
    """The job "source" has checkpoints of the steps 1 and 2; the result is that of two further steps."""
    store = server.spec().wire()
    return run_on_ranks("object_cases:save", 2, store=store, folder=SOURCE, layout=TP2_EP2, keys=server.keys)


def _adopt(server: ObjectServer, name: str, attempt: int = 1) -> "StorePath | None":
    """Let the controller of job ``name`` take over the checkpoint of step 2."""
    store = server.spec().wire()
    uri = f"{store['uri']}/{SOURCE}"
    made = job(checkpoint={"store": store, "resumeFrom": {"uri": uri, "step": 2}})
    wanted = Fork.of(spec_of(made), uri)
    assert wanted is not None
    own = server.folder(name)
    assert attempts.claim(own, attempt, "controller")
    return wanted.adopt(own / "checkpoints", "tiny", attempt)


def _resume(server: ObjectServer, name: str, port: int | None = None) -> list[Any]:
    store = server.spec(port).wire()
    return run_on_ranks("object_cases:resume", 2, store=store, folder=name, layout=TP2_EP2, keys=server.keys)


def test_ranks_read_the_objects_of_the_other_job_and_go_on_bitwise(
    server: ObjectServer, saved: list[Any]
) -> None:
    """No byte of the state is copied: the fork has two small objects, and the ranks ask for the source's."""
    before = {name: (server.files / "jobs" / SOURCE / name).read_bytes() for name in server.objects(SOURCE)}
    assert _adopt(server, "fork") is not None
    assert [name for name in server.objects("fork") if name.startswith("checkpoints")] == [
        "checkpoints/step-00000002.attempt-1/COMMITTED",
        "checkpoints/step-00000002.attempt-1/controller.json",
    ]
    asked = Counter[str]()

    def note(request: web.Request, _number: int) -> None:
        key = server.key(request)
        if request.method == "GET" and "distcp" in key:
            asked[key.split("/")[1]] += "Range" in request.headers

    with faulty(server, note) as proxy:
        resumed = _resume(server, "fork", proxy.port)
    assert set(asked) == {SOURCE} and asked[SOURCE] > 10, asked
    for expected, found in zip(saved, resumed, strict=True):
        assert found["steps"] == expected["steps"]
        weights = expected["weights"]
        assert all(torch.equal(found["weights"][name], value) for name, value in weights.items())
    after = {name: (server.files / "jobs" / SOURCE / name).read_bytes() for name in server.objects(SOURCE)}
    assert after == before, "it is only read"


@pytest.mark.usefixtures("saved")
def test_a_source_that_is_removed_is_named_by_all_ranks_and_not_replaced(server: ObjectServer) -> None:
    assert _adopt(server, "late") is not None
    place = server.files / "jobs" / SOURCE / "checkpoints" / "step-00000002"
    kept = place.with_name("kept")
    shutil.move(place, kept)
    try:
        errors = [found["error"] for found in _resume(server, "late")]
        gone = f"{server.scheme}://runs/jobs/{SOURCE}/checkpoints/step-00000002"
        assert len(errors) == 2 and all(f"checkpoint {gone}: " in error for error in errors), errors
        assert all("is missing" in error for error in errors)
        own = server.files / "jobs" / "late" / "checkpoints" / "step-00000002.attempt-1"
        (own / "COMMITTED").rename(own / "DAMAGED")  # as the controller does then
        assert complete_steps(server.folder("late") / "checkpoints") == []
        with pytest.raises(ValueError, match=f"{gone}, from which this job has started, was removed before"):
            _adopt(server, "late", attempt=2)
    finally:
        shutil.move(kept, place)
