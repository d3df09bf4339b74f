"""Hosts with everything of jobs but their controllers: Ray, trainers' agents, real engines with their agents.

What Kubernetes does is a stand-in: a container's process starts again when it has ended, and ends when the
agent says for some seconds that the engine does not live.
"""

import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from grpo_operator.api.names import GCS_PORT
from support.at_points import FOLDER
from support.engine_hosts import EngineOnHost
from support.host_pods import Pods, popen, until
from support.hosts import Host, hosts
from support.memory_limits import MemoryLimit
from support.ray_cluster import SLOW_START

LIVENESS_SECONDS = 20.0  # without a sign of life before an engine is killed, as by its livenessProbe
RAY = SLOW_START | {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}


class TrainerOnHost:
    """A training pod: a Ray node for ``ranks`` ranks, and the agent that keeps copies in the pod's memory.

    ``ray``: arguments of its start. ``limit``: of the agent's memory.
    """

    def __init__(
        self, host: Host, pods: Pods, folder: Path, ranks: int, ray: list[str], limit: MemoryLimit | None
    ) -> None:
        self.host, self.limit = host, limit
        self._pods, self._folder = pods, folder
        self._ray = ["-c", "from ray.scripts.scripts import main; main()", "start", "--block", *ray]
        self._ray += [f"--node-ip-address={host.address}", "--num-cpus=4", "--object-store-memory=200000000"]
        self._ray += [f"--resources={json.dumps({'trainer': ranks})}" if ranks else "--resources={}"]

    def start(self) -> None:
        """Start the pod, with nothing in its memory, and wait until Ray's node runs."""
        self._weights = Path(tempfile.mkdtemp(dir="/dev/shm"))  # a memory volume is a tmpfs
        log = self._folder / f"ray-{self.host.address}.log"
        log.unlink(missing_ok=True)
        self._node = self._start_node(log)
        self.start_agent()
        deadline = time.monotonic() + 300
        while "Ray runtime started" not in log.read_text():
            if self._node.poll() is not None:  # on a busy machine Ray gives up a start that takes too long
                self._node = self._start_node(log)
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)

    def _start_node(self, log: Path) -> "subprocess.Popen[bytes]":
        own = {"GRPO_WEIGHTS_DIR": str(self._weights), FOLDER: str(self._folder / "faults")}
        return popen(self.host, log, own | RAY | self._pods.clock(self.host), *self._ray)

    def start_agent(self) -> None:
        program = ["-m", "grpo_worker.weightsync.main", "trainer", "--weights", str(self._weights)]
        environment = self._pods.environment(self.host)
        log = self._folder / f"agent-{self.host.address}.log"
        self.agent = popen(self.host, log, environment, *program, limit=self.limit)

    def end(self) -> None:
        """SIGKILL all processes at once; the pod's memory is lost."""
        members = [psutil.Process(self._node.pid), *psutil.Process(self._node.pid).children(recursive=True)]
        self.agent.kill()
        for process in members:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.agent.wait()
        self._node.wait()
        shutil.rmtree(self._weights)


class Machines:
    """Options that all jobs of ``folder`` share. ``faults``: folder of the current job's faults.

    ``further``: containers on the further hosts of engines.
    """

    def __init__(self, folder: Path, all_hosts: list[Host]) -> None:
        self.folder, self.faults = folder, folder / "faults"
        self.pods = Pods(folder, all_hosts)
        self.engines: list[EngineOnHost] = []
        self.further: list[EngineOnHost] = []
        self.trainers: list[TrainerOnHost] = []
        self._limits: list[MemoryLimit] = []
        self._ended = threading.Event()
        self._keepers: list[threading.Thread] = []

    def start_engine(self, own: Sequence[Host], fields: dict[str, Any]) -> None:
        """Start an engine on hosts of its own."""
        name = f"engine-{len(self.engines)}"
        shape = fields | {"hosts": len(own)}
        self.engines.append(EngineOnHost(own[0], self.pods, self.folder, name, **shape))
        for index, host in enumerate(own[1:], 1):
            further = shape | {"index": index, "first": self.engines[-1]}
            self.further.append(EngineOnHost(host, self.pods, self.folder, f"{name}-{index}", **further))

    def start_trainer(self, host: Host, ranks: int, agent_memory: int | None) -> None:
        """Start a training pod; the first one has Ray's head. ``agent_memory``: MiB, limit of its agent."""
        ray = [f"--address={self.trainer.address}:{GCS_PORT}"] if self.trainers else [
            "--head", f"--port={GCS_PORT}", "--include-dashboard=false",
            f"--temp-dir=/tmp/grpo-whole-{os.getpid()}",
        ]  # fmt: skip
        if agent_memory:
            self._limits.append(MemoryLimit(agent_memory))
        limit = self._limits[-1] if agent_memory else None
        self.trainers.append(TrainerOnHost(host, self.pods, self.folder, ranks, ray, limit))
        self.trainers[-1].start()

    def keep(self) -> None:
        """From now on start engines' containers again that have ended."""
        engines = (*self.engines, *self.further)
        self._keepers = [threading.Thread(target=self._keep, args=(e,), daemon=True) for e in engines]
        for keeper in self._keepers:
            keeper.start()

    @property
    def trainer(self) -> Host:
        """The host of Ray's head, where the controller runs."""
        return self.trainers[0].host

    def await_engines(self, seconds: float = 600) -> None:
        """Wait until all engines answer."""
        until(lambda: all(e.status().get("state") in ("STALE", "SERVING") for e in self.engines), seconds,
              lambda: "\n".join(engine.last_words() for engine in self.engines))  # fmt: skip

    def end(self) -> None:
        self._ended.set()
        for keeper in self._keepers:
            keeper.join(10)
        for engine in (*self.engines, *self.further):
            engine.end()
        for trainer in reversed(self.trainers):
            trainer.end()
        for limit in self._limits:
            limit.remove()

    def _keep(self, engine: EngineOnHost) -> None:
        """Start an engine's container again when it has ended, and end it when it does not live."""
        seen: float | None = None  # when it lived last; None: it starts
        while not self._ended.wait(1):
            if engine.process.poll() is not None:
                engine.start()
                seen = None
            elif engine.lives():
                seen = time.monotonic()
            elif seen is not None and time.monotonic() - seen > LIVENESS_SECONDS:
                engine.kill()


@contextmanager
def machines(
    folder: Path, *engines: dict[str, Any], ranks: Sequence[int] = (2,), agent_memory: int | None = None
) -> Iterator[Machines]:
    """Run everything of jobs but their controllers, until engines with these fields answer.

    ``engines``: fields of each, with ``hosts`` if it has several. ``ranks``: on each host of trainers, of
    which the first has Ray's head. ``agent_memory``: MiB of the limit of each trainers' agent.
    """
    ours = [f"trainer-{number}" for number in range(len(ranks))]
    counts = [engine.get("hosts", 1) for engine in engines]
    theirs = [f"engine-{number}" for number in range(sum(counts))]
    with hosts(*ours, *theirs, memory=theirs) as made:
        running, left = Machines(folder, made), iter(made)
        try:
            trainers = [(next(left), own) for own in ranks]
            for fields, count in zip(engines, counts, strict=True):
                running.start_engine([next(left) for _ in range(count)], fields)
            for host, own in trainers:
                running.start_trainer(host, own, agent_memory)
            running.keep()
            running.await_engines()
            yield running
        finally:
            running.end()
