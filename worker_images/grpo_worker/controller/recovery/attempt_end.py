"""End of an attempt: what an error says, who caused it, and whether another attempt can help."""

import logging
from dataclasses import dataclass
from typing import Literal

from grpo_worker.common.errors import one_line
from grpo_worker.common.store_problems import STORE, store_problem, with_store_problem
from grpo_worker.controller.recovery.failures import comes_from_outside
from grpo_worker.controller.recovery.run_record import Cause
from grpo_worker.controller.training.parity import NotFiniteError, ParityError
from grpo_worker.controller.training.worker_group import GangError
from grpo_worker.controller.validation.setback import DivergedError, SetbackError, ValidationRegressedError
from grpo_worker.rewards.verifiers import RewardError
from grpo_worker.roles.host import RankHost
from grpo_worker.rollout.sampling import UnfitEngineError

log = logging.getLogger(__name__)
_FINAL = (
    ParityError,
    RewardError,
    UnfitEngineError,
    SetbackError,
)  # unless a server or an engine caused them


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of an attempt, or its end by a rollback. ``final``: every other one would fail in the same way.

    ``host``: of the ranks that failed, if they are all in one pod. ``since``: time of its first sign, None if
    it is unknown. ``regressed``: the scores of a validation set have fallen. ``diverged``: a metric has
    stayed outside of its range.
    """

    message: str
    cause: Cause | Literal["rollback"]
    final: bool
    host: RankHost | None = None
    since: float | None = None
    regressed: bool = False
    diverged: bool = False


def failure_of(error: Exception, store: str = STORE) -> Failure:
    """Return the failure that an error is; the stack of one that is not expected is logged.

    That of an error of the job's own code on a rank is the rank's, which no log of the rank has.
    ``store``: name of the job's store in the message.
    """
    outside = error.outside if isinstance(error, GangError) else comes_from_outside(error)
    outside = outside or bool(store_problem(error))
    cause: Cause = "infrastructure" if outside else "job"
    if isinstance(error, (GangError, NotFiniteError, *_FINAL)):
        message = with_store_problem(str(error), error, store)
        final = isinstance(error, _FINAL) and not outside
        if isinstance(error, GangError):
            if error.__cause__ is not None and not outside:
                log.error("a rank failed", exc_info=error.__cause__)
            return Failure(message, cause, final, error.host, error.since)
        regressed, diverged = isinstance(error, ValidationRegressedError), isinstance(error, DivergedError)
        return Failure(message, cause, final, regressed=regressed, diverged=diverged)
    log.error("the attempt failed", exc_info=error)
    return Failure(with_store_problem(one_line(error), error, store), cause, False)
