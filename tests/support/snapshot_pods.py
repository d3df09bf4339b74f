"""Training pods with real agents, and ranks that keep their snapshots there."""

import shutil
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import uvicorn

from grpo_worker.checkpointing.snapshots import file_of, is_written, mark_written, remove_older
from grpo_worker.checkpointing.state_file import read_state, write_state
from grpo_worker.controller.recovery.memory_tier import MemoryTier
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
        until(lambda: self._server.started)

    def wipe(self) -> None:
        """Another pod takes its place."""
        shutil.rmtree(self.snapshots)

    def kept_of(self, rank: int) -> list[str]:
        return sorted(file.parent.name for file in self.snapshots.glob(f"*/rank-{rank}.safetensors"))

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
        digest = write_state(file, self.state[rank])
        if rank not in self.broken:
            mark_written(file, digest)
        self.most = max([self.most, *(len(pod.kept_of(rank)) for pod in self.pods)])

    def snapshot_written(self, rank: int, name: str) -> bool | str:
        if rank in self.broken:
            return f"rank {rank} has no memory"
        return is_written(self.pods[rank // 2].snapshots, name, rank)

    def load_snapshot(self, rank: int, name: str) -> None:
        self.state[rank] = read_state(file_of(self.pods[rank // 2].snapshots, name, rank))


def until(check: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def open_tier(gang: Gang, folder: Path) -> MemoryTier:
    return MemoryTier(gang, 1, 1, folder / "memory.json")  # type: ignore[arg-type]


def on_the_store() -> "Future[None]":
    records: Future[None] = Future()
    records.set_result(None)
    return records


def complete_snapshot(tier: MemoryTier, gang: Gang, step: int, attempt: int = 1) -> None:
    gang.state = [100 * step + 10 * attempt + rank for rank in range(RANKS)]
    assert tier.due(step)
    tier.snapshot(step, attempt, {"step": step}, on_the_store())
    assert not tier.due(step + 1), "one at a time"

    def settled() -> bool:
        tier.poll()
        return tier.due(step + 1)

    until(settled)
