"""Jobs and ranks with a real server of objects as their store, and the faults of networks and servers."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from grpo_devcluster.results import record_from_test
from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.checkpointing.store import complete, complete_steps, newest_sound, remove_remains
from grpo_worker.common.store_path import uploads_below
from support.departing import finish, start
from support.google_store import google_server
from support.job_outcome import outcome, outcome_of
from support.object_store import ObjectServer, s3_server
from support.ranks.launcher import run as run_on_ranks
from support.store_proxy import faulty

TP2_EP2 = {"tensor": 2, "expert": 2, "expert_tensor": 1}
STEPS = 4
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[s3_server, google_server], ids=["s3", "gs"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ObjectServer]:
    with request.param(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture(scope="module")
def saved(server: ObjectServer) -> list[Any]:
    """The job "saved" has checkpoints of the steps 1 and 2; the result is that of two further steps."""
    return _run("save", server, "saved")


def _run(case: str, server: ObjectServer, folder: str, store: StoreSpec | None = None) -> list[Any]:
    """Run a case on ranks that have the server's keys. ``store``: theirs; default: that of the server."""
    wire = (store or server.spec()).wire()
    return run_on_ranks(
        f"object_cases:{case}", 2, store=wire, folder=folder, layout=TP2_EP2, keys=server.keys
    )


def _equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Return whether two results are bitwise the same."""
    same = all(torch.equal(one["weights"][name], value) for name, value in other["weights"].items())
    return same and one["steps"] == other["steps"]


def test_ranks_without_any_file_resume_bitwise(server: ObjectServer, saved: list[Any]) -> None:
    resumed = _run("resume", server, "saved")
    assert all(_equal(*pair) for pair in zip(saved, resumed, strict=True))
    assert complete_steps(server.folder("saved") / "checkpoints") == [1, 2]


def test_a_copy_of_the_objects_is_a_checkpoint_of_a_file_system(
    server: ObjectServer, saved: list[Any], tmp_path: Path
) -> None:
    shutil.copytree(server.files / "jobs" / "saved", tmp_path / "copy")
    resumed = _run("resume", server, "copy", StoreSpec(path=str(tmp_path)))
    assert all(_equal(*pair) for pair in zip(saved, resumed, strict=True))


@pytest.mark.fault(
    row="21",
    point="an S3 or Google server answers 500 and 503, throttles, and cuts connections, also in a part",
    witness="faults counted by kind",
    compared="steps and weights of ranks on a server without faults, bitwise",
    partial="no bound",
)
def test_throttling_errors_and_cut_connections_cost_time_and_no_bit(
    server: ObjectServer, saved: list[Any]
) -> None:
    """Of each kind of fault several happen, among them one in the middle of the upload of a part."""
    ways: dict[int, int | str] = {2: 503, 3: server.throttles, 5: 500, 8: "cut"}
    cut_parts: list[str] = []

    def choose(request: web.Request, number: int) -> int | str | None:
        fault = ways.get(number % 11)
        if server.is_part(request) and len(cut_parts) < 2:
            cut_parts.append(server.key(request))
            return "cut"
        return fault

    with faulty(server, choose) as proxy:
        found = _run("save", server, "faults", server.spec(proxy.port))
        between = proxy.fired.copy()
        resumed = _run("resume", server, "faults", server.spec(proxy.port))
        fired = proxy.fired
    assert len(cut_parts) == 2, "no part of an upload was cut"
    assert all(between[str(kind)] >= 3 for kind in ways.values()), between
    assert sum((fired - between).values()) >= 3, "none while it was read"
    for undisturbed, one, other in zip(saved, found, resumed, strict=True):
        assert _equal(undisturbed, one) and _equal(undisturbed, other)
    assert not uploads_below(server.folder("faults"))
    record_from_test("reliability", {f"{server.scheme}_faults_survived": sum(fired.values())})


@pytest.mark.fault(
    row="21",
    point="an S3 or Google server fails all requests in a save, for longer than each is tried again",
    witness="failed requests counted",
    compared="steps and weights of ranks on a server without faults, bitwise",
    partial="no bound on the delay of a step",
)
def test_an_outage_longer_than_all_retries_delays_the_checkpoint(
    server: ObjectServer, saved: list[Any]
) -> None:
    down = threading.Event()
    began: list[float] = []

    def choose(request: web.Request, _number: int) -> int | None:
        if not began and server.is_part(request) and "distcp" in server.key(request):
            began.append(time.monotonic())
            down.set()
        return 500 if began and time.monotonic() < began[0] + server.patience + 5 else None

    with faulty(server, choose) as proxy:
        found = _run("save", server, "outage", server.spec(proxy.port))
    assert down.is_set() and proxy.fired["500"] >= 6
    assert all(_equal(*pair) for pair in zip(saved, found, strict=True))
    assert all(_equal(*pair) for pair in zip(saved, _run("resume", server, "outage"), strict=True))


def _largest(server: ObjectServer, folder: str) -> Path:
    root = server.files / "jobs" / folder / "checkpoints" / "step-00000002"
    return max(root.glob("*.distcp"), key=lambda file: file.stat().st_size)


@pytest.mark.fault(
    row="22",
    point="a bit of an object changes after the save",
    witness="all ranks name object and bytes",
    bound="at the load",
    partial="detection only",
)
def test_a_changed_bit_is_found_by_its_digest_on_all_ranks(server: ObjectServer) -> None:
    _run("save", server, "bit")
    file = _largest(server, "bit")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    errors = [found["error"] for found in _run("resume", server, "bit")]
    assert all(f"{file.name} was changed after the save, between bytes" in error for error in errors), errors


@pytest.mark.fault(
    row="22",
    point="the largest object of the newest checkpoint is missing",
    witness="it is set aside",
    bound="at the load",
    partial="no ranks load it; nothing compared",
)
def test_without_a_file_the_checkpoint_before_is_used(server: ObjectServer) -> None:
    _run("save", server, "missing")
    _largest(server, "missing").unlink()
    root = server.folder("missing") / "checkpoints"
    assert newest_sound(root, "tiny") == root / "step-00000001"
    assert complete_steps(root) == [1], "the damaged one is set aside"


@pytest.mark.fault(
    row="3,18",
    point="SIGKILL of the controller and all ranks while a checkpoint is uploaded",
    witness="no marker of that step",
    compared="all steps and the ledger of an undisturbed run, bitwise",
    partial="no bound",
)
@pytest.mark.parametrize("lag", [0, 1])
def test_a_controller_and_ranks_that_are_killed_in_an_upload_resume_bitwise_on_empty_disks(
    server: ObjectServer, tmp_path: Path, lag: int
) -> None:
    """All processes of the job die while the state of step 4 is uploaded; new ones find no file of theirs.

    ``lag``: the job generates samples ahead, and the new processes train on the same ones.
    """
    name, changes = f"job-{lag}", {"staleness": {"maxVersionLag": lag}}
    calm = start(tmp_path / "undisturbed", STEPS, changes=changes)
    assert finish(calm) == f"Succeeded {STEPS}: {STEPS} steps done"
    uploads = threading.Event()

    def choose(request: web.Request, _number: int) -> None:
        key = server.key(request)
        if "step-00000004" in key and "distcp" in key and request.method != "GET":
            uploads.set()
            time.sleep(0.5)  # hold the whole proxy: nothing gets further

    with faulty(server, choose) as proxy:
        store = server.spec(proxy.port).wire()
        process = start(tmp_path / "first", STEPS, store, name=name, changes=changes)
        assert uploads.wait(400), "the last checkpoint never began"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert [found for found in server.objects(name) if found.endswith("COMMITTED")] == [
        "checkpoints/step-00000002.attempt-1/COMMITTED"
    ]
    second = start(tmp_path / "second", STEPS, server.spec().wire(), name=name, changes=changes)
    assert finish(second).startswith(f"Succeeded {STEPS}")
    names = server.objects(name)
    logs = ("".join(_pieces(server, name, kind)) for kind in ("ledger.jsonl", "metrics.jsonl"))
    assert outcome_of(*logs) == outcome(tmp_path / "undisturbed")
    marked = [found for found in names if found.endswith("COMMITTED")]
    assert marked == [f"checkpoints/step-0000000{s}.attempt-{a}/COMMITTED" for s, a in ((2, 1), (4, 2))]
    assert not any("step-00000004.attempt-1" in found for found in names), "what was not completed is removed"
    ahead = [found for found in names if found.startswith("pending/")]
    assert ahead == ["pending/step-00000002.attempt-1.npz"] * lag, "no step comes after the last one"
    assert not uploads_below(server.folder(name))


def _pieces(server: ObjectServer, name: str, log: str) -> list[str]:
    root, names = server.files / "jobs" / name, server.objects(name)
    return [(root / found).read_text() for found in names if found.startswith(f"{log}/")]


def test_an_upload_that_was_killed_leaves_nothing(server: ObjectServer) -> None:
    root = server.folder("killed") / "checkpoints"
    assert not isinstance(root, Path)
    file = root / "step-00000003.attempt-1" / "__0_0.distcp"
    stream = file.fs.open(file.path, "wb", block_size=5 << 20)
    stream.write(bytes(12 << 20))
    stream.closed = True  # as if its process were gone
    assert server.objects("killed") == [] and complete(root) == {}
    assert bool(uploads_below(root)) == server.lists_uploads
    remove_remains(root, 1)
    assert bool(uploads_below(root)) == server.lists_uploads, "attempt 1 itself may still write"
    remove_remains(root, 2)
    assert not uploads_below(root)
