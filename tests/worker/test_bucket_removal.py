"""The process that removes a deleted job's objects, on real servers."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from unittest.mock import patch

import pytest
from aiohttp import web
from upath import UPath

from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.checkpointing.store import complete_steps
from grpo_worker.common.store_path import uploads_below
from support.google_store import google_server
from support.object_store import ObjectServer, s3_server
from support.store_proxy import faulty

NAME = "default-tiny-moe-12345678"
NEIGHBOURS = ("default-tiny-moe-12345678x", "default-tiny-moe-12345679", "default-tiny-moe")
STEPS = (10, 20)
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[s3_server, google_server], ids=["s3", "gs"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ObjectServer]:
    with request.param(tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture(autouse=True)
def objects(server: ObjectServer) -> None:
    for name in (NAME, *NEIGHBOURS):
        root = _folder(server, name)
        for step in STEPS:
            for file in ("__0_0.distcp", "__1_0.distcp", "COMMITTED"):
                (root / "checkpoints" / f"step-{step:08d}.attempt-1" / file).write_text("{}")
        (root / "run.json").write_text("{}")


def _folder(server: ObjectServer, name: str) -> UPath:
    folder = server.folder(name)
    assert isinstance(folder, UPath)
    return folder


def _start(store: StoreSpec, name: str = NAME) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "grpo_worker.checkpointing.removal"]
    command += [f"/store/{name}", json.dumps(store.wire())]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def _remove(store: StoreSpec, name: str = NAME) -> tuple[int, str]:
    """Return the exit code and the last line that was written."""
    process = _start(store, name)
    said = process.communicate(timeout=120)[1].splitlines()
    return process.returncode, said[-1] if said else ""


def _unchanged(server: ObjectServer) -> bool:
    return all(len(server.objects(name)) == 3 * len(STEPS) + 1 for name in NEIGHBOURS)


def _markers(server: ObjectServer) -> list[str]:
    return [name for name in server.objects(NAME) if name.endswith("COMMITTED")]


def test_the_objects_of_the_job_are_removed_and_no_others(server: ObjectServer) -> None:
    for _ in range(2):
        code, said = _remove(server.spec())
        assert code == 0, said
        assert server.objects(NAME) == [] and _unchanged(server)


def test_uploads_that_were_not_ended_are_removed(server: ObjectServer) -> None:
    file = _folder(server, NAME) / "checkpoints" / "step-00000030.attempt-1" / "__0_0.distcp"
    stream = file.fs.open(file.path, "wb", block_size=5 << 20)
    stream.write(bytes(12 << 20))
    stream.closed = True  # as if its process were gone
    assert bool(uploads_below(_folder(server, NAME))) == server.lists_uploads
    assert _remove(server.spec())[0] == 0
    assert not uploads_below(_folder(server, NAME)) and server.objects(NAME) == []


def test_a_run_that_is_killed_leaves_no_checkpoint_and_the_next_one_finishes(server: ObjectServer) -> None:
    begun = threading.Event()

    def choose(request: web.Request, _number: int) -> int | None:
        if server.removes(request) and not _markers(server):
            begun.set()
            time.sleep(0.5)  # hold the whole proxy until the process is killed
            return 500
        return None

    assert _markers(server)
    with faulty(server, choose) as proxy:
        process = _start(server.spec(proxy.port))
        assert begun.wait(60), "it removes nothing"
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert server.objects(NAME) and not _markers(server)
    assert complete_steps(_folder(server, NAME) / "checkpoints") == []
    assert _remove(server.spec())[0] == 0
    assert server.objects(NAME) == [] and _unchanged(server)


def test_errors_of_the_server_are_waited_out(server: ObjectServer) -> None:
    faults: dict[int, int | str] = {1: 503, 2: 500, 4: "cut"}
    with faulty(server, lambda _request, number: faults.get(number)) as proxy:
        code, said = _remove(server.spec(proxy.port))
        assert proxy.fired.total() == 3
    assert code == 0, said
    assert server.objects(NAME) == [] and _unchanged(server)


def test_more_objects_than_one_request_takes(server: ObjectServer) -> None:
    """A request lists and removes up to 1,000 objects; the server keeps each as a file."""
    server.put(NAME, (f"ledger.jsonl/{index}.jsonl" for index in range(2300)))
    assert len(server.objects(NAME)) > 2300
    assert _remove(server.spec())[0] == 0
    assert server.objects(NAME) == [] and _unchanged(server)


def test_without_access_nothing_is_removed_and_the_store_is_named(server: ObjectServer) -> None:
    with patch.dict(os.environ, server.wrong_keys):
        code, said = _remove(server.spec())
    assert code == 1
    uri = f"{server.scheme}://runs/jobs"
    assert said.startswith(f"checkpoint.store.uri={uri}: {NAME} is not removed: PermissionError"), said
    assert len(server.objects(NAME)) == 3 * len(STEPS) + 1


def test_a_bucket_that_is_gone_has_nothing_to_remove(server: ObjectServer) -> None:
    code, said = _remove(server.spec().model_copy(update={"uri": f"{server.scheme}://gone/jobs"}))
    assert code == 0, said
    assert _unchanged(server)
