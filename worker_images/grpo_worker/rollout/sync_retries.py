"""Retries of engines that failed to take a version: each pause is twice as long as the one before (pure).

Each try reads the version from the trainers' pods, so an engine that fails must not try without a pause.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from grpo_worker.rollout.routing import EngineEntry, Life

T = TypeVar("T")  # version that the engine must serve
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0  # seconds


@dataclass(frozen=True, slots=True)
class Failures(Generic[T]):
    """Failures in a row of one life of an engine to take ``target``.

    ``pause``: seconds before the next try, which may begin at ``due``.
    """

    life: Life
    target: T
    count: int
    pause: float
    due: float


class SyncRetries(Generic[T]):
    """Failures by engine. A server or pod that was replaced, and another target, are tried at once."""

    def __init__(self) -> None:
        self._failures: dict[str, Failures[T]] = {}

    def of(self, engine: EngineEntry, target: T) -> Failures[T] | None:
        """Return the failures of this life of an engine to take ``target``; None if it had none."""
        found = self._failures.get(engine.name)
        return found if found is not None and (found.life, found.target) == (engine.life, target) else None

    def due(self, engine: EngineEntry, target: T, now: float) -> bool:
        """Return whether the engine may be tried at the time ``now``."""
        failures = self.of(engine, target)
        return failures is None or now >= failures.due

    def failed(self, engine: EngineEntry, target: T, now: float) -> None:
        """Note a failure that ended at the time ``now``."""
        before = self.of(engine, target)
        pause = min(2 * before.pause, _LONGEST_PAUSE) if before else _FIRST_PAUSE
        count = before.count + 1 if before else 1
        self._failures[engine.name] = Failures(engine.life, target, count, pause, now + pause)

    def succeeded(self, engine: EngineEntry) -> None:
        """Forget the failures of an engine."""
        self._failures.pop(engine.name, None)
