"""A job's checkpoint store, filled by real trainer ranks, and engines whose agents read it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_worker.checkpointing.restart_point import CHECKPOINTS, LEDGER, RUN
from grpo_worker.checkpointing.store import WEIGHTS, directory
from grpo_worker.common.step_log import StepLog
from grpo_worker.controller.recovery.run_record import RunRecord
from grpo_worker.model_files.config import model_config
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_place import EnginePlace
from support.engine_server import JOB, Server
from support.objects import job
from support.ranks.launcher import run as run_on_ranks

RANKS = 2
TIMEOUT = 60


@dataclass(frozen=True, slots=True)
class JobStore:
    """Folder of a job in its store. ``memory``: in which its trainers' sidecars find versions."""

    folder: Path
    memory: Path

    def train(self, steps: int, every: int, parallelism: dict[str, int]) -> None:
        """Let trainer ranks train, publish and save checkpoints, and end; note it like the controller."""
        spec = job()["spec"]
        spec["trainer"] |= {"nodes": 1, "gpusPerNode": RANKS, "parallelism": parallelism}
        hf = model_config("preset:tiny-moe")
        self.memory.mkdir(exist_ok=True)
        found = run_on_ranks(
            "store_cases:train_and_save", RANKS, weights=str(self.memory), store=str(self.folder),
            spec=spec, hf=hf, steps=steps, every=every,
        )  # fmt: skip
        assert found[0][-1][-1] == steps // every * every, found
        self.begin_attempt()
        self.finish_steps(1, steps)

    def begin_attempt(self) -> None:
        """Begin an attempt of the controller."""
        RunRecord.load(self.folder / RUN).begin_attempt()

    def finish_steps(self, first: int, last: int) -> None:
        """Write the ledger's records of steps."""
        attempt, log = RunRecord.load(self.folder / RUN).attempt, StepLog(self.folder / LEDGER)
        for step in range(first, last + 1):
            log.append(step, [{"attempt": attempt, "uid": f"{step}/0"}])
        log.flush()

    def weights(self, step: int) -> Path:
        """Return the folder with the copy of a checkpoint's version."""
        return directory(self.folder / CHECKPOINTS, step) / WEIGHTS

    def agent(self, server: Server, ranks: int = 1, **how: Any) -> Agent:
        """Return the agent of a new pod, which knows nothing."""
        arguments: dict[str, Any] = {"bucket_bytes": 1 << 20, "timeout": TIMEOUT, "writer": JOB} | how
        place = EnginePlace(store=self.folder)
        return Agent("engine", server.control(TIMEOUT), ranks, place=place, **arguments)
