"""Rollback of a job to an older checkpoint, from which it goes on with other prompts."""

import logging
from dataclasses import replace

from grpo_worker.controller.recovery.attempt_end import Failure, failure_of
from grpo_worker.controller.recovery.run_record import RunRecord
from grpo_worker.controller.validation.setback import SetbackError

log = logging.getLogger(__name__)


def roll_back(setback: SetbackError, record: RunRecord, saved: list[int]) -> Failure:
    """Roll the job back if it may be; return how the attempt ends, which is the job's end otherwise.

    ``saved``: steps with a complete checkpoint. Raises SupersededError and OSError; the next attempt decides
    again then.
    """
    end, back = failure_of(setback), setback.back
    if back is None:
        return end
    step = back.choose(saved)
    if step is None:
        before = "" if back.exact else " or an earlier one"
        lacks = f"there is no complete checkpoint of step {back.step}{before}"
        return replace(end, message=f"{lacks}: {end.message}")
    if record.rollbacks - record.rollbacks_before >= setback.most:
        return replace(end, message=f"{setback.field} ({setback.most}) used up: {end.message}")
    record.roll_back(step, back.position, setback.why)
    message = f"back to step {step}, and on with other prompts: {setback.why}"
    log.warning("%s", message)
    return Failure(message, "rollback", False)
