"""A real controller's loop with real ranks that die at points of their steps; only engines are stand-ins.

    GRPO_TEST_FAULTS=FOLDER python faulty_job.py STORE STEPS

FOLDER has the faults, see at_points. It gets their witnesses, ``ends.jsonl`` (when and why each attempt
ended), ``restores.jsonl`` (when and from which step each began), ``complete.jsonl`` (when a checkpoint became
complete) and ``stragglers.jsonl`` (the ranks that were named after a step).
"""

import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from grpo_worker.checkpointing.store import STATE, complete
from grpo_worker.controller.steps.step_runner import StepRunner
from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.controller.training.processes import RayProcesses
from grpo_worker.controller.training.worker_group import WorkerGroup
from support import at_points
from support.at_points import note
from support.departing_job import RealRanks, main
from support.loop_notes import note_attempts
from support.objects import job
from support.slow_process import slowed

STRAGGLERS = {"factor": 2.0, "steps": 3}
PAUSED_STEPS = 4
CHECKED_STEPS = 8  # between checks of the gradients
FULL_STEPS, READ_ONLY_SECONDS = 6, 20.0  # of the store of checkpoints
HANG_SECONDS = 60  # a start, with its imports, must make progress within it on a busy machine


class FaultyRanks(RealRanks):
    """A job whose ranks die."""

    def __init__(self, disk: Path, steps: int, store: dict[str, str] | None) -> None:
        policy = {"backoffSeconds": 1, "hangSeconds": HANG_SECONDS, "stragglers": STRAGGLERS}
        trainer = job()["spec"]["trainer"] | {"gradientCheck": {"everySteps": CHECKED_STEPS}}
        super().__init__(disk, steps, store, restartPolicy=policy, trainer=trainer)
        self.before_generation = lambda version: self._kill(at_points.GENERATION, version + 1)
        note_attempts()
        run = StepRunner.run

        def watched_step(steps: StepRunner) -> None:
            self._kill(at_points.BETWEEN, steps.state.step + 1)
            if at_points.pending(at_points.TRUNCATED, steps.state.step + 1):
                _truncate(Path(list(complete(self.store / "checkpoints").values())[-1]))
                self._kill(at_points.TRUNCATED, steps.state.step + 1)
            self._harm_store(steps.state.step + 1)
            with self._paused(steps.state.step + 1):
                run(steps)
            if named := steps.training.watch.stragglers:
                note("stragglers", step=steps.state.step, ranks=[one.rank for one in named])

        StepRunner.run = watched_step  # type: ignore[method-assign, assignment]

    def gang(self, hf: dict[str, Any]) -> TrainerGang:
        def group(pool: Any) -> WorkerGroup:
            processes = RayProcesses(at_points.FaultyTrainer, pool)
            return WorkerGroup(at_points.FaultyTrainer, processes, self.spec.restart_policy.hang_limit)

        self.trainers = TrainerGang(self.spec, hf, self.store / "checkpoints", make_group=group)
        return self.trainers

    def _kill(self, point: str, step: int) -> None:
        for fault in at_points.pending(point, step):
            at_points.kill(fault, self.trainers.processes()[fault.rank]["pid"])

    def _harm_store(self, step: int) -> None:
        """Fill the file system of the checkpoints, or let nobody write to it, and mend it later."""
        folder = self.store / "checkpoints"
        filler = folder / "of-others"
        for fault in at_points.pending(at_points.FULL, step):
            at_points.fire(fault, os.getpid())
            with suppress(OSError), filler.open("wb") as file:
                while True:
                    file.write(bytes(1 << 20))
        if filler.exists() and step >= FULL_STEPS + min(
            fault.step for fault in at_points.faults() if fault.point == at_points.FULL
        ):
            filler.unlink()
            note("room", step=step)
        for fault in at_points.pending(at_points.READ_ONLY, step):
            at_points.fire(fault, os.getpid())
            _remount(folder, "ro")
            threading.Timer(READ_ONLY_SECONDS, _mend, [folder]).start()

    @contextmanager
    def _paused(self, step: int) -> Iterator[None]:
        """Stop a rank for the most time of a step, if there is such a fault in it or shortly before."""
        faults = [f for first in range(step - PAUSED_STEPS + 1, step + 1) for f in self._pauses(first)]
        if not faults:
            yield
            return
        pid = self.trainers.processes()[faults[0].rank]["pid"]
        with slowed(pid, stopped=0.2, going=0.05) as pauses:
            yield
        note("pauses", step=step, seen=pauses.seen)
        at_points.fire(faults[0], pid)  # each step: its witness is that of the last one

    def _pauses(self, step: int) -> list[at_points.Fault]:
        return [
            fault for fault in at_points.faults() if (fault.point, fault.step) == (at_points.PAUSES, step)
        ]


def _remount(folder: Path, mode: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{mode}", str(folder)], check=True)


def _mend(folder: Path) -> None:
    _remount(folder, "rw")
    note("writable")


def _truncate(checkpoint: Path) -> None:
    largest = max(checkpoint.glob(f"*{STATE}"), key=lambda file: file.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


if __name__ == "__main__":
    main(FaultyRanks)
