"""A job's checkpoint store, filled by real trainer ranks, and agents that read it."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from grpo_worker.checkpointing.restart_point import CHECKPOINTS, LEDGER, RUN
from grpo_worker.checkpointing.store import WEIGHTS, Origin, commit, complete, directory
from grpo_worker.common.step_log import StepLog
from grpo_worker.controller.recovery.run_record import RunRecord
from grpo_worker.model_files.config import model_config
from grpo_worker.weightsync.agent.agent import Agent
from grpo_worker.weightsync.agent.engine_place import EnginePlace
from grpo_worker.weightsync.trainer.version_copy import VersionCopy
from support.engine_server import JOB, Server
from support.objects import job
from support.ranks.launcher import run as run_on_ranks

RANKS = 2
LAYOUT = {"tensor": 2, "expert": 2}
TIMEOUT = 60


@dataclass(frozen=True, slots=True)
class JobStore:
    """Folder of a job in its store."""

    folder: Path

    def train(self, memory: Path, last: int, every: int) -> list[list[str]]:
        """Let trainer ranks start from the newest checkpoint, train up to step ``last``, and end.

        ``memory``: of their pod. Returns the digests of each rank's versions, that of the start included.
        """
        spec = job()["spec"]
        spec["trainer"] |= {"nodes": 1, "gpusPerNode": RANKS, "parallelism": LAYOUT}
        hf = model_config("preset:tiny-moe")
        memory.mkdir()
        first = max(complete(self.checkpoints), default=0)
        self.begin_attempt()
        digests = run_on_ranks(
            "store_cases:train_and_save", RANKS, weights=str(memory), store=str(self.folder),
            spec=spec, hf=hf, last=last, every=every, attempt=self.attempt,
        )  # fmt: skip
        self.finish_steps(first + 1, last)
        return digests

    def keep(self, memory: Path, version: int, world: int) -> None:
        """Save a checkpoint with what ``world`` ranks have published in ``memory``, in a new attempt."""
        weights = directory(self.checkpoints, version, self.attempt) / WEIGHTS
        weights.mkdir(parents=True)
        for rank in range(world):
            VersionCopy(memory, version, rank, weights).run()
        self.commit(version)
        self.begin_attempt()
        self.finish_steps(version, version)

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    def begin_attempt(self) -> None:
        """Begin an attempt, like the controller."""
        self.folder.mkdir(exist_ok=True)
        RunRecord.load(self.folder / RUN).begin_attempt()

    @property
    def attempt(self) -> int:
        return RunRecord.load(self.folder / RUN).attempt

    def commit(self, step: int) -> None:
        """Complete the checkpoint of ``step``, like rank 0."""
        commit(self.checkpoints, step, Origin("model", "layout", self.attempt))

    def finish_steps(self, first: int, last: int) -> None:
        """Write the ledger's records of steps, like the controller."""
        attempt, log = self.attempt, StepLog(self.folder / LEDGER)
        log.truncate(first - 1)
        for step in range(first, last + 1):
            log.append(step, [{"attempt": attempt, "uid": f"{step}/0"}])
        log.flush()

    def weights(self, step: int) -> Path:
        """Return the folder with the copy of a complete checkpoint's version."""
        return complete(self.checkpoints)[step] / WEIGHTS

    def copy(self, to: Path) -> "JobStore":
        """Return a store with the same files."""
        shutil.copytree(self.folder, to)
        return JobStore(to)

    def agent(self, server: Server, ranks: int = 1, bucket_bytes: int = 1 << 20) -> Agent:
        """Return the agent of a new pod, which knows nothing."""
        place = EnginePlace(store=self.folder)
        return Agent("engine", server.control(TIMEOUT), ranks, bucket_bytes, TIMEOUT, JOB, place=place)
