"""The controller of a job with real engines, whose parts meet faults; only the name service is a stand-in.

    GRPO_TEST_FAULTS=FOLDER GRPO_JOB_FILE=FILE ENGINE_PIDS=FOLDER python whole_controller.py

FOLDER is as for faulty_job. A step begins when ``gate`` allows it, and ``step`` has its number.
``waits.jsonl`` gets each reason for which the trainers are parked. ENGINE_PIDS has the id of each engine's
first process.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from grpo_worker.controller import main
from grpo_worker.controller.status.progress import ProgressBoard
from grpo_worker.controller.steps.step_runner import StepRunner
from grpo_worker.controller.training import gang
from grpo_worker.rollout import engine_pool
from grpo_worker.rollout.dispatcher import Dispatcher
from grpo_worker.rollout.lease import Lease
from support import at_points
from support.at_points import note
from support.loop_notes import note_attempts

_TOKENS = 20  # that the engine has sent of the step before it is harmed


def pace_steps() -> None:
    """Let a step wait for its gate, and note its number."""
    folder, run = Path(os.environ[at_points.FOLDER]), StepRunner.run

    def paced(steps: StepRunner) -> None:
        while steps.state.step >= int((folder / at_points.GATE).read_text()):
            time.sleep(0.05)
        (folder / at_points.STEP).write_text(str(steps.state.step + 1))
        run(steps)

    StepRunner.run = paced  # type: ignore[method-assign, assignment]


def harm_engines() -> None:
    """Freeze an engine's scheduler, or only witness that it generates, if there is such a fault.

    ``rank`` of the fault: number of the engine.
    """
    moved, tokens = Dispatcher.moved, dict[at_points.Fault, int]()

    def watched(dispatcher: Dispatcher, lease: Lease) -> None:
        moved(dispatcher, lease)
        step = int((Path(os.environ[at_points.FOLDER]) / at_points.STEP).read_text())
        for point in (at_points.TOKENS, at_points.FREEZE):
            for fault in at_points.pending(point, step):
                name = f"engine-{fault.rank}"
                tokens[fault] = tokens.get(fault, 0) + (lease.entry.name == name)
                if tokens[fault] >= _TOKENS:
                    at_points.fire(fault, _scheduler(name).pid)
                    if point == at_points.FREEZE:
                        _scheduler(name).send_signal(signal.SIGSTOP)

    Dispatcher.moved = watched  # type: ignore[method-assign, assignment]


def _scheduler(engine: str) -> psutil.Process:
    first = psutil.Process(int((Path(os.environ["ENGINE_PIDS"]) / engine).read_text()))
    (found,) = [p for p in first.children(recursive=True) if "sglang::scheduler" in "".join(p.cmdline())]
    return found


def note_waits() -> None:
    update, seen = ProgressBoard.update, set[str]()

    def noted(board: ProgressBoard, **changes: Any) -> None:
        update(board, **changes)
        if (text := str(changes.get("waiting", ""))) and text not in seen:
            seen.add(text)
            note("waits", step=board.get().step, reason=text)

    ProgressBoard.update = noted  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    vars(gang)["TrainerWorker"] = at_points.FaultyTrainer
    vars(engine_pool)["ServiceAddresses"] = lambda service, _port: lambda: service.split(",")
    note_attempts()
    pace_steps()
    harm_engines()
    note_waits()
    main.main()
