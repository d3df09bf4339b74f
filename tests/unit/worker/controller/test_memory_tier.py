"""Snapshots in pods' memory: replicas, losses, damage, and which attempt they are of."""

import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from grpo_worker.checkpointing.snapshots import file_of, pull, remove_older, seal, sound
from grpo_worker.controller.recovery.memory_tier import MemoryTier, next_pods
from grpo_worker.weightsync.trainer.agent import application

RANKS = 4  # two on each of two pods


class Pod:
    """The agent of a training pod and its memory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.snapshots = root / "snapshots"
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._server = uvicorn.Server(uvicorn.Config(application(root), port=port, log_level="error"))
        threading.Thread(target=self._server.run, daemon=True).start()
        _until(lambda: self._server.started)

    def wipe(self) -> None:
        """Another pod takes its place."""
        shutil.rmtree(self.snapshots)

    def kept_of(self, rank: int) -> list[str]:
        return sorted(file.parent.name for file in self.snapshots.glob(f"*/rank-{rank}.pt"))

    def end(self) -> None:
        self._server.should_exit = True


class Gang:
    """Ranks whose state is one number."""

    def __init__(self, pods: list[Pod]) -> None:
        self.pods = pods
        self.state = [0] * RANKS
        self.broken: set[int] = set()  # ranks whose next snapshot cannot be written
        self.most = 0  # snapshots of one rank in one pod, while one is written

    def sources(self) -> dict[int, str]:
        return {rank: self.pods[rank // 2].url for rank in range(RANKS)}

    def call(self, method: str, *args: Any) -> Any:
        return [getattr(self, method)(rank, *args) for rank in range(RANKS)]

    def take_snapshot(self, rank: int, name: str, kept: str | None) -> None:
        root = self.pods[rank // 2].snapshots
        remove_older(root, name, kept)
        file = file_of(root, name, rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(self.state[rank]))
        if rank not in self.broken:
            seal(file)
        self.most = max([self.most, *(len(pod.kept_of(rank)) for pod in self.pods)])

    def snapshot_written(self, rank: int, name: str) -> bool | str:
        if rank in self.broken:
            return f"rank {rank} has no memory"
        return file_of(self.pods[rank // 2].snapshots, name, rank).with_suffix(".json").is_file()

    def load_snapshot(self, rank: int, name: str) -> None:
        self.state[rank] = int(file_of(self.pods[rank // 2].snapshots, name, rank).read_text())


def _until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[list[Pod]]:
    found = [Pod(tmp_path / name) for name in ("a", "b")]
    yield found
    for pod in found:
        pod.end()


@pytest.fixture
def gang(pods: list[Pod]) -> Gang:
    return Gang(pods)


@pytest.fixture
def tier(gang: Gang, tmp_path: Path) -> MemoryTier:
    return _tier(gang, tmp_path)


def _tier(gang: Gang, folder: Path) -> MemoryTier:
    return MemoryTier(gang, 1, 1, folder / "memory.json")  # type: ignore[arg-type]


def _on_the_store() -> "Future[None]":
    records: Future[None] = Future()
    records.set_result(None)
    return records


def _snapshot(tier: MemoryTier, gang: Gang, step: int, attempt: int = 1) -> None:
    gang.state = [100 * step + 10 * attempt + rank for rank in range(RANKS)]
    assert tier.due(step)
    tier.snapshot(step, attempt, {"step": step}, _on_the_store())
    assert not tier.due(step + 1), "one at a time"

    def settled() -> bool:
        tier.poll()
        return tier.due(step + 1)

    _until(settled)


def test_a_new_controller_brings_the_gang_back(tier: MemoryTier, gang: Gang, tmp_path: Path) -> None:
    _snapshot(tier, gang, 3)
    expected, gang.state = gang.state, [0] * RANKS
    restored = _tier(gang, tmp_path).restore(after=2)
    assert restored is not None and (restored.step, restored.source) == (3, "memory")
    assert restored.controller_state == {"step": 3} and gang.state == expected


def test_a_lost_pod_gets_its_ranks_from_the_other(tier: MemoryTier, gang: Gang, pods: list[Pod]) -> None:
    _snapshot(tier, gang, 3)
    expected, gang.state = gang.state, [0] * RANKS
    pods[0].wipe()
    assert tier.restore(after=2) is not None
    assert gang.state == expected


def test_ranks_that_change_places_find_their_snapshots(tier: MemoryTier, gang: Gang, pods: list[Pod]) -> None:
    _snapshot(tier, gang, 3)
    expected, gang.state = gang.state, [0] * RANKS
    gang.pods = pods[::-1]
    assert tier.restore(after=2) is not None
    assert gang.state == expected


def test_nothing_is_restored_when_both_copies_are_gone_or_the_store_is_newer(
    tier: MemoryTier, gang: Gang, pods: list[Pod]
) -> None:
    _snapshot(tier, gang, 3)
    assert tier.restore(after=3) is None
    for pod in pods:
        pod.wipe()
    assert tier.restore(after=2) is None


def test_a_damaged_copy_is_not_used_but_its_replica_is(tier: MemoryTier, gang: Gang, pods: list[Pod]) -> None:
    _snapshot(tier, gang, 3)
    expected, gang.state = gang.state, [0] * RANKS
    file = file_of(pods[0].snapshots, "3.1", 0)
    file.write_text(str(int(file.read_text()) + 1))  # as long as before
    assert not sound(pods[0].snapshots, "3.1", 0)
    assert tier.restore(after=2) is not None
    assert gang.state == expected


def test_attempts_at_one_step_do_not_mix(tier: MemoryTier, gang: Gang, pods: list[Pod]) -> None:
    _snapshot(tier, gang, 3, attempt=1)
    expected = gang.state
    gang.state = [7] * RANKS
    tier.snapshot(
        3, 2, {"step": 3}, _on_the_store()
    )  # written, but the controller dies before the replicas are there
    tier.begin_attempt()
    pods[1].wipe()
    assert tier.restore(after=2) is not None
    assert gang.state == expected


@pytest.mark.parametrize("problem", [None, OSError("No space left on device")], ids=["slow", "full"])
def test_a_snapshot_counts_once_its_records_are_on_the_store(
    tier: MemoryTier, gang: Gang, tmp_path: Path, problem: OSError | None
) -> None:
    records: Future[None] = Future()
    tier.snapshot(3, 1, {"step": 3}, records)
    for _ in range(20):
        tier.poll()
        time.sleep(0.01)
    assert not (tmp_path / "memory.json").exists() and not tier.due(4)
    if problem is None:
        records.set_result(None)
    else:
        records.set_exception(problem)

    def settled() -> bool:
        tier.poll()
        return tier.due(4)

    _until(settled)
    assert (tmp_path / "memory.json").exists() == (problem is None)


def test_a_pod_never_holds_more_than_two_of_a_rank(tier: MemoryTier, gang: Gang, pods: list[Pod]) -> None:
    """The plan of the pods' memory counts on that."""
    for step in range(1, 6):
        _snapshot(tier, gang, step)
    assert gang.most == 2
    assert [pod.kept_of(0) for pod in pods] == [["4.1", "5.1"], ["4.1", "5.1"]]


def test_what_failed_is_removed_and_the_complete_one_stays(
    tier: MemoryTier, gang: Gang, pods: list[Pod]
) -> None:
    _snapshot(tier, gang, 3)
    expected = gang.state
    gang.broken = {3}
    for step in (4, 5, 6):
        _snapshot(tier, gang, step)
    assert gang.most == 2 and pods[1].kept_of(3) == ["3.1", "6.1"]
    gang.state = [0] * RANKS
    assert tier.restore(after=2) is not None and gang.state == expected


def test_a_late_request_of_an_earlier_attempt_removes_nothing_newer(gang: Gang, pods: list[Pod]) -> None:
    for name in ("5.1", "6.1", "4.2"):
        gang.call("take_snapshot", name, "5.1")
    body = {"name": "6.1", "rank": 0, "holders": [pods[0].url], "kept": "5.1"}
    httpx.post(f"{pods[1].url}/v1/snapshots", json=body)
    assert [pod.kept_of(2) for pod in pods] == [[], ["4.2", "5.1"]]


def test_a_pod_gives_nothing_but_snapshots(pods: list[Pod], tmp_path: Path) -> None:
    for name in ("../secret", "5", "%2e%2e"):
        assert httpx.get(f"{pods[0].url}/v1/snapshots/{name}/0.pt").status_code in (400, 404)
        body = {"name": name, "rank": 0, "holders": [pods[0].url], "kept": None}
        assert httpx.post(f"{pods[1].url}/v1/snapshots", json=body).status_code in (400, 404)
    assert not pull(tmp_path / "c", "9.1", 0, [pods[0].url, "http://127.0.0.1:1"], 5)


def test_replicas_go_to_the_next_pod_and_one_pod_has_none() -> None:
    assert next_pods({0: "a", 1: "a", 2: "b", 3: "c"}, 1) == {0: ["b"], 1: ["b"], 2: ["c"], 3: ["a"]}
    assert next_pods({0: "a", 1: "a"}, 1) == {0: [], 1: []}
