"""Setback: training has got worse, and the job is to go back to an older checkpoint or to end."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WayBack:
    """Checkpoint of ``step`` and ``position``, the state of the source of prompts to go on with from there.

    ``exact``: no other checkpoint will do; else it is the newest one up to ``step``.
    """

    step: int
    position: dict[str, Any]
    exact: bool = True

    def choose(self, saved: list[int]) -> int | None:
        """Return the step to go back to; None: there is none. ``saved``: steps with a complete checkpoint."""
        fit = [step for step in saved if step == self.step or (not self.exact and step < self.step)]
        return max(fit, default=None)


class SetbackError(RuntimeError):
    """Training has got worse. ``why``: what shows that. ``back``: None if the job cannot be rolled back.

    ``field``: that has ``most``, the rollbacks since the job was resumed last.
    """

    field = ""

    def __init__(self, why: str, remedy: str, back: WayBack | None = None, most: int = 1) -> None:
        """``remedy``: what the user can do when the job ends."""
        super().__init__(f"{why}; {remedy}")
        self.why, self.back, self.most = why, back, most


class ValidationRegressedError(SetbackError):
    """The scores of a validation set have fallen."""

    field = "validation.rollbacks"


class DivergedError(SetbackError):
    """A metric has stayed outside of its range."""

    field = "divergence.rollbacks"
