"""A real controller's loop with real ranks that die at points of their steps; only engines are stand-ins.

    GRPO_TEST_FAULTS=FOLDER python faulty_job.py STORE STEPS

FOLDER has the faults, see at_points. It gets their witnesses, ``ends.jsonl`` (when and why each attempt
ended) and ``restores.jsonl`` (when and from which step each began).
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from grpo_worker.checkpointing.store import STATE, complete
from grpo_worker.controller.loop import GrpoLoop
from grpo_worker.controller.recovery.attempt_end import Failure
from grpo_worker.controller.training.gang import Restored, TrainerGang
from grpo_worker.controller.training.processes import RayProcesses
from grpo_worker.controller.training.worker_group import WorkerGroup
from support import at_points
from support.clocks import FakeClock
from support.departing_job import RealRanks, main

HANG_SECONDS = 60  # a start, with its imports, must make progress within it on a busy machine


class RealTime(FakeClock):
    """The machine's clock; engines, which take no time, add to ``time`` for nothing."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class FaultyRanks(RealRanks):
    """A job whose ranks die."""

    def __init__(self, disk: Path, steps: int, store: dict[str, str] | None) -> None:
        super().__init__(disk, steps, store, restartPolicy={"backoffSeconds": 1, "hangSeconds": HANG_SECONDS})
        self.clock = RealTime()
        self.before_generation = lambda version: self._kill(at_points.GENERATION, version + 1)
        one_step, end_attempt, resume = GrpoLoop._one_step, GrpoLoop._end_attempt, GrpoLoop._resume

        def watched_step(loop: GrpoLoop) -> None:
            self._kill(at_points.BETWEEN, loop._step + 1)
            if at_points.pending(at_points.TRUNCATED, loop._step + 1):
                _truncate(Path(list(complete(self.store / "checkpoints").values())[-1]))
                self._kill(at_points.TRUNCATED, loop._step + 1)
            one_step(loop)

        def watched_end(loop: GrpoLoop, failure: Failure) -> None:
            _note("ends", step=loop._step, message=failure.message)
            end_attempt(loop, failure)

        def watched_resume(loop: GrpoLoop, restored: Restored) -> None:
            _note("restores", step=restored.step)
            resume(loop, restored)

        GrpoLoop._one_step = watched_step  # type: ignore[method-assign, assignment]
        GrpoLoop._resume = watched_resume  # type: ignore[method-assign, assignment]
        GrpoLoop._end_attempt = watched_end  # type: ignore[method-assign, assignment]

    def gang(self, hf: dict[str, Any]) -> TrainerGang:
        def group(pool: Any) -> WorkerGroup:
            processes = RayProcesses(at_points.FaultyTrainer, pool)
            return WorkerGroup(at_points.FaultyTrainer, processes, self.spec.restart_policy.hang_limit)

        self.trainers = TrainerGang(self.spec, hf, self.store / "checkpoints", make_group=group)
        return self.trainers

    def _kill(self, point: str, step: int) -> None:
        for fault in at_points.pending(point, step):
            at_points.kill(fault, self.trainers.processes()[fault.rank]["pid"])


def _note(name: str, **line: Any) -> None:
    with (Path(os.environ[at_points.FOLDER]) / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps({"at": time.time()} | line) + "\n")


def _truncate(checkpoint: Path) -> None:
    largest = max(checkpoint.glob(f"*{STATE}"), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


if __name__ == "__main__":
    main(FaultyRanks)
