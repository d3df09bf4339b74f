"""Jobs with all their processes on hosts of this machine: controller, ranks, real engines, agents, reward."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from grpo_operator.api.job_config import JobConfig
from grpo_operator.api.names import CONTROLLER_PORT, GCS_PORT
from grpo_operator.plan.weight_path import job_weight_path
from support.at_points import FOLDER, GATE, Fault, write_faults
from support.engine_hosts import DEADLINE, WRITER, EngineOnHost
from support.host_pods import kill_session, popen, until
from support.job_outcome import outcome
from support.machines import RAY, Machines
from support.objects import job, pool_of, spec_of

REWARD_PORT = 9100
HANG_SECONDS = 60  # of restartPolicy
REWARD_SECONDS = 5  # of reward.timeoutSeconds
_REWARD_AWAY = 15.0  # seconds for which a reward server that has ended or hangs stays away


class WholeJob:
    """A job of ``steps`` steps in ``folder``, which runs until the context ends."""

    def __init__(
        self, machines: Machines, folder: Path, steps: int, faults: Sequence[Fault],
        engines: Sequence[EngineOnHost], memory: bool, **spec: Any,
    ) -> None:  # fmt: skip
        self.folder, self.machines, self.steps, self.engines = folder, machines, steps, engines
        self._ended = threading.Event()
        write_faults(folder / "faults", faults)
        machines.faults.unlink(missing_ok=True)
        machines.faults.symlink_to(folder / "faults")
        self.allow(0)
        changes: dict[str, Any] = {
            "data": job()["spec"]["data"] | {"responseLength": 48},
            "reward": {"url": f"http://127.0.0.1:{REWARD_PORT}/", "timeoutSeconds": REWARD_SECONDS},
            "weightSync": {"timeoutSeconds": DEADLINE, "bucketMegabytes": 1},
            "restartPolicy": {"backoffSeconds": 1, "hangSeconds": HANG_SECONDS},
            "checkpoint": {"store": {"path": str(folder)}, "everySteps": 4, "exportAtEnd": False},
            "observability": {"tensorboard": False},
        }  # fmt: skip
        if memory:
            changes["checkpoint"]["memory"] = {"everySteps": 1}
        parsed = spec_of(job(totalSteps=steps, **changes | spec))
        config = JobConfig(
            name=folder.name, namespace="default", spec=parsed, min_available=1, fp8=False,
            rollout_service=",".join(engine.host.address for engine in engines),
            engines=len(engines), weight_path=job_weight_path(parsed, pool_of(parsed)),
            writer=WRITER, store=folder / "job",
        )  # fmt: skip
        (folder / "job.json").write_text(json.dumps(config.wire()))
        self._environment = machines.pods.environment(machines.trainer) | RAY | {
            FOLDER: str(machines.faults), "ENGINE_PIDS": str(machines.folder),
            "GRPO_JOB_FILE": str(folder / "job.json"),
            "RAY_ADDRESS": f"{machines.trainer.address}:{GCS_PORT}",
        }  # fmt: skip
        self._reward = self._start_reward()
        threading.Thread(target=self._keep_reward, daemon=True).start()
        self._controller = self._start("controller", "whole_controller.py")

    def allow(self, step: int) -> None:
        """Let the job make all steps up to ``step``."""
        temporary = self.folder / "gate"
        temporary.write_text(str(step))
        temporary.rename(self.folder / "faults" / GATE)

    def wait(self, step: int, seconds: float) -> float:
        """Allow steps up to ``step`` and wait until they have ended; return the seconds that it took."""
        started = time.monotonic()
        self.allow(step)
        until(lambda: self.step() >= step, seconds, self.last_words)
        return time.monotonic() - started

    def status(self) -> dict[str, Any]:
        """Return the controller's status; {} if it does not answer."""
        with suppress(httpx.HTTPError):
            url = f"http://127.0.0.1:{CONTROLLER_PORT}/v1/status"
            return dict(self.machines.trainer.call(httpx.get, url, timeout=5).json())
        return {}

    def step(self) -> int:
        assert self._controller.poll() is None, self.last_words()
        return int(self.status().get("step", 0))

    def notes(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / "faults" / f"{name}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def witness(self, fault: Fault) -> dict[str, Any]:
        return dict(json.loads((self.folder / "faults" / fault.witness).read_text()))

    def finish(self, seconds: float) -> "Outcome":
        """Let the job make its last steps; return its results."""
        self.allow(self.steps)
        self.await_phase("Succeeded", seconds)
        return self.outcome()

    def await_phase(self, phase: str, seconds: float) -> str:
        """Wait until the job is in a phase; return its message."""
        until(lambda: self.status().get("phase") == phase, seconds, self.last_words)
        return str(self.status()["message"])

    def await_witness(self, fault: Fault, seconds: float) -> None:
        until((self.folder / "faults" / fault.witness).exists, seconds, self.last_words)

    def outcome(self) -> "Outcome":
        ledger, losses, _ = outcome(self.folder)
        for sample in ledger:
            del sample["engine"]  # any may generate a sample
        metrics = (self.folder / "job" / "metrics.jsonl").read_text().splitlines()
        until(lambda: len({e.status().get("checksum") for e in self.engines}) == 1, 180)
        checksum = self.engines[0].status()["checksum"]
        return Outcome(ledger, losses, [json.loads(line)["weights"] for line in metrics], checksum)

    def last_words(self) -> str:
        return f"{self.status()}\n{(self.folder / 'controller.log').read_text()[-6000:]}"

    def end(self) -> None:
        self._ended.set()
        for process in (self._controller, self._reward):
            kill_session(process)

    def _start(self, name: str, program: str, *arguments: str) -> "subprocess.Popen[bytes]":
        log = self.folder / f"{name}.log"
        path = str(Path(__file__).parent / program)
        return popen(self.machines.trainer, log, self._environment, path, *arguments)

    def _start_reward(self) -> "subprocess.Popen[bytes]":
        return self._start("reward", "reward_program.py", "127.0.0.1", str(REWARD_PORT))

    def _keep_reward(self) -> None:
        """Bring a reward server back that has ended or stopped, after a while."""
        while not self._ended.wait(0.5):
            state = Path(f"/proc/{self._reward.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
            if state in ("T", "Z") and not self._ended.wait(_REWARD_AWAY):
                if state == "T":
                    os.kill(self._reward.pid, signal.SIGCONT)
                else:
                    self._reward.wait()
                    self._reward = self._start_reward()


class Outcome:
    """Results of a job. ``checksum``: of the engines' weights after the last step."""

    def __init__(self, ledger: list[Any], losses: list[Any], weights: list[Any], checksum: str) -> None:
        self.ledger, self.losses, self.weights, self.checksum = ledger, losses, weights, checksum

    def same_as(self, other: "Outcome") -> None:
        assert self.ledger == other.ledger, "the same samples, each once"
        assert self.losses == other.losses
        assert self.weights == other.weights
        assert self.checksum == other.checksum, "the engines hold other weights"


@contextmanager
def whole_job(
    machines: Machines, folder: Path, steps: int, faults: Sequence[Fault] = (),
    engines: Sequence[EngineOnHost] = (), memory: bool = False, **spec: Any,
) -> Iterator[WholeJob]:  # fmt: skip
    """Run a job, of which no step begins before it is allowed.

    ``engines``: default: all. ``memory``: the pods' memory keeps the state of each step.
    """
    running = WholeJob(machines, folder, steps, faults, engines or machines.engines, memory, **spec)
    try:
        yield running
    finally:
        running.end()
