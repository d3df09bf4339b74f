"""The memory of agents contains the bytes that they fetch, and the plan has room for them.

An agent of a training pod fetches snapshots into the pod's memory, and one of an engine whole versions.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import torch

from grpo_operator.plan.planner.agent_memory import AGENT_MEMORY, trainer_agent
from grpo_worker.checkpointing.snapshots import file_of, mark_written
from grpo_worker.checkpointing.state_file import write_state
from grpo_worker.weightsync.trainer.publisher import publish
from support import whole_versions
from support.late_engine import WORLD, Process, trainers
from support.memory_limits import MemoryLimit

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="memory limits need root")
SNAPSHOT = 640 << 20  # bytes; more than an agent has that keeps none
STATE = torch.zeros(SNAPSHOT, dtype=torch.uint8)


class Pod:
    """The memory of a training pod, and its agent."""

    def __init__(self, root: Path, limit: MemoryLimit | None = None) -> None:
        self.root = root
        self.agent = Process(f"trainer --weights {root}", root / "log", limit)

    def write(self, name: str, rank: int) -> None:
        """Write a rank's snapshot, as its process does, and let the agent seal it."""
        file = file_of(self.root / "snapshots", name, rank)
        file.parent.mkdir(parents=True, exist_ok=True)
        mark_written(file, write_state(file, STATE))
        body = {"job": "job", "name": name, "rank": rank}
        httpx.post(f"{self.agent.url}/v1/snapshots/seals", json=body).raise_for_status()

    def fetch(self, name: str, rank: int, kept: str | None, holder: "Pod") -> int:
        """Let the agent fetch a snapshot; return the HTTP status."""
        body = {"job": "job", "name": name, "rank": rank, "holders": [holder.agent.url], "kept": kept}
        return httpx.post(f"{self.agent.url}/v1/snapshots", json=body, timeout=300).status_code


@contextmanager
def _pod(limit: MemoryLimit | None = None) -> Iterator[Pod]:
    root = Path(tempfile.mkdtemp(dir="/dev/shm"))  # a memory volume is a tmpfs
    pod = Pod(root, limit)
    try:
        pod.agent.await_answer()
        yield pod
    finally:
        pod.agent.end()
        shutil.rmtree(root)


@contextmanager
def _limited(size: int) -> Iterator[tuple[Pod, MemoryLimit]]:
    limit = MemoryLimit(size >> 20)
    try:
        with _pod(limit) as pod:
            yield pod, limit
    finally:
        limit.remove()


def _publish(root: Path, version: int, weights: list[torch.Tensor]) -> int:
    """Publish one slice of each rank, with deltas; return the bytes of the version."""
    parts = [("w", tuple(weight.shape), 0, 0, weight) for weight in weights]
    blobs = [publish(root, version, rank, WORLD, [part], deltas=True) for rank, part in enumerate(parts)]
    return sum(blob.blob_bytes for blob in blobs)


@pytest.mark.fault(
    row="23",
    point="an agent fetches more than its memory limit",
    witness="SIGKILL by the kernel, counted",
    bound="10 s",
    partial="no job, nothing compared",
)
def test_fetched_snapshots_count_towards_the_agents_memory() -> None:
    with _pod() as holder, _limited(AGENT_MEMORY) as (pod, limit):
        holder.write("1.1", 0)
        with pytest.raises(httpx.HTTPError):
            pod.fetch("1.1", 0, None, holder)
        assert pod.agent.ended(10) == -signal.SIGKILL and limit.kills == 1


def test_an_agent_with_the_planned_memory_keeps_replicas_and_restores_its_own() -> None:
    planned = trainer_agent(SNAPSHOT, replicas=1, nodes=2)
    with _pod() as holder, _limited(planned) as (pod, limit):
        kept = None
        for step in (1, 2, 3):
            name = f"{step}.1"
            for rank in (0, 1):  # rank 1 is the pod's own: it lost its memory
                if rank == 0 or step == 1:
                    holder.write(name, rank)
                    assert pod.fetch(name, rank, kept, holder) == 200
            shutil.rmtree(holder.root / "snapshots" / (kept or "none"), ignore_errors=True)
            kept = name
        assert limit.kills == 0
        held = sorted(str(file.parent.name) for file in pod.root.glob("snapshots/*/rank-0.safetensors"))
        assert held == ["2.1", "3.1"]


def test_an_agent_with_the_planned_memory_holds_a_version_and_applies_deltas() -> None:
    root = Path(tempfile.mkdtemp(dir="/dev/shm"))
    weights = [torch.rand(2**18, 512, generator=torch.Generator().manual_seed(rank)) for rank in range(WORLD)]
    version = _publish(root, 1, weights)
    limit = MemoryLimit((AGENT_MEMORY + version) >> 20)
    try:
        with trainers(root) as urls:
            argv = limit.command(f"{sys.executable} {whole_versions.__file__} {urls[0]} {WORLD}")
            process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert process.stdin and process.stdout
            received = []
            for number in (1, 2, 3):
                if number > 1:
                    for weight in weights:
                        weight[::50] += 0.001
                    _publish(root, number, weights)
                print(number, file=process.stdin, flush=True)
                received.append(int(process.stdout.readline() or "-1"))
            process.stdin.close()
            assert process.wait(30) == 0 == limit.kills
        assert received[0] == version >= 1 << 30
        assert all(0 < size < version / 10 for size in received[1:]), received
    finally:
        limit.remove()
        shutil.rmtree(root)
