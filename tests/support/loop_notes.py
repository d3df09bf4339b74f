"""Notes that a controller under test leaves beside its faults: when attempts begin and end, and why."""

from grpo_worker.controller.loop import GrpoLoop
from grpo_worker.controller.recovery.attempt_end import Failure
from grpo_worker.controller.training.gang import Restored
from support.at_points import note


def note_attempts() -> None:
    """From now on note in ``ends`` why attempts end, and in ``restores`` from which step they begin."""
    end_attempt, resume = GrpoLoop._end_attempt, GrpoLoop._resume

    def noted_end(loop: GrpoLoop, failure: Failure) -> None:
        note("ends", step=loop.state.step, message=failure.message)
        end_attempt(loop, failure)

    def noted_resume(loop: GrpoLoop, restored: Restored) -> None:
        note("restores", step=restored.step)
        resume(loop, restored)

    GrpoLoop._resume = noted_resume  # type: ignore[method-assign, assignment]
    GrpoLoop._end_attempt = noted_end  # type: ignore[method-assign, assignment]
