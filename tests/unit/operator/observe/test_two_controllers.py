"""Two controllers of one job, one on a node that was cut off: the operator hears the one that has the job."""

import contextlib
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from grpo_operator.api import names
from grpo_operator.api.v1alpha1.status import Phase
from grpo_operator.observe import pod_client
from grpo_operator.observe.pod_client import Controllers, PodClient
from grpo_operator.plan.observed import given_way, own_report
from grpo_worker.controller.recovery.run_record import RunRecord
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.status.server import application
from support.engine_server import free_port
from support.loop_world import World
from support.objects import job

ADDRESSES = ("127.0.0.2", "127.0.0.3")


@contextlib.contextmanager
def _serving(board: ProgressBoard, address: str, port: int) -> Iterator[None]:
    config = uvicorn.Config(application(board, list), host=address, port=port, log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline and thread.is_alive()
        time.sleep(0.01)
    yield
    server.should_exit = True
    thread.join()


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ProgressBoard]]:
    """Boards of two controllers that answer, the older one first."""
    port = free_port()
    monkeypatch.setattr(pod_client, "CONTROLLER_PORT", port)
    boards = [ProgressBoard() for _ in ADDRESSES]
    with contextlib.ExitStack() as stack:
        for board, address in zip(boards, ADDRESSES, strict=True):
            stack.enter_context(_serving(board, address, port))
        yield boards


@pytest.fixture
async def client() -> AsyncIterator[PodClient]:
    client = PodClient(_no_tls)
    yield client
    await client.close()


async def _no_tls(owner: names.Owner) -> ssl.SSLContext | None:
    raise AssertionError(f"the pods of {owner.text} serve HTTP")


def _pods(*addresses: str) -> tuple[dict[str, Any], ...]:
    labels = {names.POOL_LABEL: names.CONTROLLER}
    return tuple(
        {"metadata": {"name": address, "labels": labels}, "status": {"podIP": address}}
        for address in addresses
    )


async def test_the_report_with_the_newest_attempt_counts(
    boards: list[ProgressBoard], client: PodClient
) -> None:
    old, new = boards
    old.update(attempt=3, step=9)
    pods = _pods(*ADDRESSES)
    for order in (pods, pods[::-1]):
        found = (await client.controllers(order)).status
        assert found is not None and found.attempt == 3, "the new one has not begun"
    new.update(attempt=4, step=7)
    for order in (pods, pods[::-1]):
        found = (await client.controllers(order)).status
        assert found is not None and (found.attempt, found.step) == (4, 7)


async def test_a_controller_that_finds_itself_superseded_reports_no_more(
    boards: list[ProgressBoard], client: PodClient, tmp_path: Path
) -> None:
    """The real loop of a job runs until another controller begins an attempt."""
    old, _ = boards
    world = World(tmp_path)
    world.board = old

    def before(version: int) -> None:
        other = RunRecord.load(tmp_path / "run.json")
        if version == 2 and other.attempt == 1:
            other.begin_attempt()

    world.before_generation = before
    world.run()
    status = old.get()
    assert status.superseded and status.phase == Phase.RECOVERING
    assert status.message == "attempt 2 has begun in another controller; this one is attempt 1"
    alone = await client.controllers(_pods(ADDRESSES[0]))
    assert alone == Controllers(None, frozenset([ADDRESSES[0]]))
    assert given_way(_pods(ADDRESSES[0]), alone.superseded) == list(_pods(ADDRESSES[0]))
    both = await client.controllers(_pods(*ADDRESSES))
    assert both.status is not None and both.status.attempt == 0, "of the one that has just started"
    assert given_way(_pods(*ADDRESSES), both.superseded) == [], "the other one goes on"


async def test_the_report_of_a_deleted_job_of_the_same_name_is_not_its_successors(
    boards: list[ProgressBoard], client: PodClient
) -> None:
    old, new = job(), job()
    new["metadata"]["uid"] = "87654321-bbbb"
    boards[0].update(writer=names.writer(old), attempt=3, phase=Phase.SUCCEEDED)
    report = (await client.controllers(_pods(ADDRESSES[0]))).status
    assert report is not None and own_report(old, report) == report
    assert own_report(new, report) is None
    boards[0].update(writer="")
    assert own_report(new, (await client.controllers(_pods(ADDRESSES[0]))).status) is not None, (
        "an older image names no job"
    )


async def test_an_answer_without_end_is_not_read_to_its_end(
    boards: list[ProgressBoard], client: PodClient
) -> None:
    boards[0].update(message="x" * (5 << 20))
    assert (await client.controllers(_pods(ADDRESSES[0]))).status is None
