"""Account of a job's GPU time (pure): what every GPU did at every moment.

Times are whole nanoseconds, so that the parts add up to wall time x GPUs exactly.
"""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Use(StrEnum):
    """What the GPUs of a pool do.

    WAIT: trainers wait for samples or for the store. BUBBLE: engines wait for new weights. REPLAYED: work
    of a step that a failure interrupted, and of steps that are repeated after it. IDLE: nothing can run.
    SPARE: held for the loss of a training pod.
    """

    GENERATE = "generate"
    TRAIN = "train"
    SYNC = "sync"
    WAIT = "wait"
    BUBBLE = "bubble"
    REPLAYED = "replayed"
    IDLE = "idle"
    SPARE = "spare"


LOST = (Use.REPLAYED, Use.IDLE)


@dataclass(slots=True)
class GpuAccount:
    """Nanoseconds of GPU time by use. The unfinished step is kept apart until it is known to count.

    ``trainers``, ``engines``: GPUs of each pool; ``engines`` is 0 where both share the GPUs of the trainers.
    ``spares``: GPUs of spare training pods. ``lost``: IDLE and REPLAYED by cause.
    """

    trainers: int
    engines: int
    spares: int = 0
    used: Counter[Use] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    _training: Counter[Use] = field(default_factory=Counter)  # of the unfinished step, by pool
    _rollout: Counter[Use] = field(default_factory=Counter)
    _use: Use = Use.IDLE  # of the trainers
    _generating: bool = False
    _cause: str = "start"

    def stopped_by(self, cause: str) -> bool:
        """Return whether the trainers can do nothing now, because of ``cause``."""
        return self._use is Use.IDLE and self._cause == cause

    @property
    def use(self) -> Use:
        """Return what the trainers do."""
        return self._use

    def add(self, nanoseconds: int) -> None:
        """Account for time that has passed since the last change."""
        self.used[Use.SPARE] += nanoseconds * self.spares
        if self._use is Use.IDLE:
            self.lost[self._cause] += nanoseconds * self.trainers * (not (self._shared and self._generating))
        self._training[self._trainers_use()] += nanoseconds * self.trainers
        engines = self._engines_use()
        self._rollout[engines] += nanoseconds * self.engines
        if engines is Use.IDLE:
            self.lost[self._cause] += nanoseconds * self.engines

    def trains(self, use: Use) -> None:
        """Change what the trainers do."""
        self._use = use

    def stops(self, cause: str) -> None:
        """The trainers can do nothing any more because of ``cause``."""
        self._use, self._cause = Use.IDLE, cause

    def generates(self, generating: bool) -> None:
        """Change whether answers are generated."""
        self._generating = generating

    def absent(self, nanoseconds: int, cause: str) -> None:
        """Account for time without a controller."""
        self.used[Use.SPARE] += nanoseconds * self.spares
        gpu_time = nanoseconds * (self.trainers + self.engines)
        self.used[Use.IDLE] += gpu_time
        self.lost[cause] += gpu_time

    def idle(self) -> dict[str, float]:
        """Return the seconds of the unfinished step in which each pool waited, as metrics."""
        trainers = self._training[Use.WAIT] + self._training[Use.IDLE]
        found = {"timing_s/trainers_idle": trainers / self.trainers / 1e9}
        if self._shared:
            return found
        engines = self._rollout[Use.BUBBLE] + self._rollout[Use.IDLE]
        return found | {"timing_s/engines_idle": engines / self.engines / 1e9}

    def finish_step(self, replayed: bool) -> None:
        """The step is finished. ``replayed``: it had been finished before a failure."""
        if replayed:
            self._lose(self._training)
            self._lose(self._rollout)
        self._commit()

    def interrupt(self, keeps_answers: bool) -> None:
        """The step will be repeated. ``keeps_answers``: those that were generated so far are used."""
        self._lose(self._training)
        if not keeps_answers:
            self._lose(self._rollout)
        self._commit()

    @property
    def total(self) -> Counter[Use]:
        """Return the nanoseconds by use, including the unfinished step."""
        return self.used + self._training + self._rollout

    def state(self) -> dict[str, Any]:
        """Return what another controller needs to go on; the unfinished step counts as it is."""
        return {"used": {str(use): time for use, time in self.total.items()}, "lost": dict(self.lost)}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from the account of an earlier controller."""
        self.used = Counter({Use(use): time for use, time in state["used"].items()})
        self.lost = Counter(state["lost"])

    @property
    def _shared(self) -> bool:
        return self.engines == 0

    def _trainers_use(self) -> Use:
        return Use.GENERATE if self._shared and self._generating else self._use

    def _engines_use(self) -> Use:
        if self._generating:
            return Use.GENERATE
        return self._use if self._use in (Use.SYNC, Use.IDLE) else Use.BUBBLE

    def _lose(self, step: Counter[Use]) -> None:
        work = [use for use in step if use not in LOST]
        again = sum(step.pop(use) for use in work)
        step[Use.REPLAYED] += again
        self.lost[self._cause] += again

    def _commit(self) -> None:
        self.used.update(self._training)
        self.used.update(self._rollout)
        self._training.clear()
        self._rollout.clear()
