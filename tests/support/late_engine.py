"""A model of two gibibytes at the trainers' sidecar, and the agent of an engine that comes late."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from grpo_operator.api.catalog.architectures import architecture
from grpo_worker.common import tls
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.quantization.fp8 import Part
from grpo_worker.weightsync.protocol.manifest import Manifest
from grpo_worker.weightsync.trainer.publisher import publish
from support.engine_server import JOB, free_port
from support.memory_limits import MemoryLimit

# DeepSeek-V3's architecture; 530 million parameters in float32.
MODEL = architecture("tiny-moe") | {
    "num_hidden_layers": 14,
    "first_k_dense_replace": 1,
    "hidden_size": 768,
    "moe_intermediate_size": 256,
    "n_routed_experts": 64,
    "n_group": 1,
    "topk_group": 1,
}
# SGLang pads narrower experts on CPUs, and the first rank would keep all of them.
UNPADDED = architecture("tiny-moe") | {"hidden_size": 256, "moe_intermediate_size": 256}
WORLD = 2


def publish_model(root: Path, version: int, model: dict[str, Any] = MODEL) -> list[Manifest]:
    """Publish random weights: experts by rank, attention's outputs cut by columns, other tensors by rows."""
    generator = torch.Generator().manual_seed(version)
    parts: list[list[Part]] = [[] for _ in range(WORLD)]
    for number, (name, shape) in enumerate(sorted(family_of(model).shapes(model).items())):
        whole = torch.empty(shape).uniform_(-0.05, 0.05, generator=generator)
        dim = int(name.endswith("o_proj.weight"))
        count = 1 if ".experts." in name or shape[dim] % WORLD else WORLD
        for piece, part in enumerate(whole.chunk(count, dim)):
            rank = (number + piece) % WORLD
            parts[rank].append((name, tuple(shape), dim, piece * shape[dim] // count, part))
    return [publish(root, version, rank, WORLD, parts[rank]) for rank in range(WORLD)]


class Process:
    """A sidecar, as its container starts it, on this machine."""

    def __init__(
        self, arguments: str, log: Path, limit: MemoryLimit | None = None, port: int | None = None,
        address: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        self._port, self._log = port or free_port(), log
        self.url = tls.url(address, self._port)
        command = f"{sys.executable} -m grpo_worker.weightsync.main {arguments}"
        command += f" --host {address} --port {self._port}"
        argv = limit.command(command) if limit else ["bash", "-c", f"exec {command}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with log.open("ab") as output:
            self._process = subprocess.Popen(argv, env=environment, stdout=output, stderr=output)

    @property
    def pid(self) -> int:
        return self._process.pid

    def await_answer(self) -> None:
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(f"{self.url}/healthz", verify=tls.own()).raise_for_status()
                return
            except httpx.HTTPError:
                assert time.monotonic() < deadline and self._process.poll() is None, self._log.read_text()
                time.sleep(0.1)

    def status(self) -> dict[str, Any]:
        """Return the status of a rollout agent."""
        return dict(httpx.get(f"{self.url}/v1/status", timeout=30, verify=tls.own()).json())

    def sync(self, version: int, sources: dict[int, str], attempt: int = 0) -> dict[str, Any]:
        """Let a rollout agent load a version, as the controller does. Raises httpx.HTTPError."""
        named = {str(rank): url for rank, url in sources.items()}
        body = {"writer": JOB, "attempt": attempt, "version": version, "sources": named}
        answer = httpx.post(f"{self.url}/v1/sync", json=body, timeout=300, verify=tls.own())
        return dict(answer.json())

    def await_state(self, state: str, seconds: float) -> dict[str, Any]:
        """Wait until a rollout agent reports ``state``, and return its status."""
        deadline = time.monotonic() + seconds
        while (status := self.status())["state"] != state:
            assert time.monotonic() < deadline, f"{status}\n{self._log.read_text()[-4000:]}"
            time.sleep(0.1)
        return status

    def peak_mebibytes(self) -> float:
        """Return the largest resident memory so far, with the pages of files."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) / 1024

    def ended(self, seconds: float) -> int:
        """Wait for its end, and return the exit code."""
        return self._process.wait(seconds)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def trainers(root: Path) -> Iterator[dict[int, str]]:
    """Serve what is published in ``root``; yield rank -> URL."""
    sidecar = Process(f"trainer --weights {root}", root / "log")
    try:
        sidecar.await_answer()
        yield dict.fromkeys(range(WORLD), sidecar.url)
    finally:
        sidecar.end()


@contextmanager
def limited_agent(
    mebibytes: int, engine: str, key: Path, folder: Path, bucket_mebibytes: int = 512, ranks: int = 1,
    peers: str = "", port: int | None = None, store: Path | None = None,
) -> Iterator[tuple[Process, MemoryLimit]]:  # fmt: skip
    """Run the agent of the engine at URL ``engine`` with a memory limit.

    ``peers``: host name of the pool's agents, which listen on the port of agents in pods. ``store``: folder
    of the job in its checkpoint store.
    """
    limit = MemoryLimit(mebibytes)
    arguments = f"rollout --engine {engine} --engine-ranks {ranks} --admin-key {key} --writer {JOB}"
    arguments += f" --bucket-megabytes {bucket_mebibytes}" + (f" --peers {peers}" if peers else "")
    arguments += f" --store {store}" if store else ""
    agent = Process(arguments, folder / "agent.log", limit, port)
    try:
        agent.await_answer()
        yield agent, limit
    finally:
        agent.end()
        limit.remove()
