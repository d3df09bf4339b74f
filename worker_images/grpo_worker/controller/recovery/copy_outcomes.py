"""Outcome of the copies in the pods' memory, as status and alerts tell it."""

from collections.abc import Callable

from grpo_operator.api.messages import MemoryCopies
from grpo_worker.common.errors import LONGEST


class CopyOutcomes:
    """Counts what goes wrong between two copies that are complete in all of their pods.

    A copy may take as long as it needs, so its duration is no failure. But it is of no use any more once a
    checkpoint of a later step is complete in the store: each of these counts.
    """

    def __init__(self, publish: Callable[[MemoryCopies], None] = lambda report: None) -> None:
        """``publish``: shows the report after every change."""
        self._publish = publish
        self.report = MemoryCopies()

    def found(self, step: int | None) -> None:
        """Record the step of the newest copy that an attempt may begin with; None: there is none."""
        self._set(step=step)

    def complete(self, step: int, lacks: str = "") -> None:
        """Record a copy that counts. ``lacks``: what it lacks to be in all of its pods, or ""."""
        self._set(step=step, failures=self.report.failures + 1 if lacks else 0, problem=lacks)

    def failed(self, problem: str) -> None:
        """Record a copy that does not count; the one before stays."""
        self._set(failures=self.report.failures + 1, problem=problem[:LONGEST])

    def lost(self, problem: str) -> None:
        """Record that the newest copy cannot be loaded."""
        self.found(None)
        self.failed(problem)

    def overtaken(self, step: int, stored: int) -> None:
        """Record that the checkpoint of ``stored`` was complete before the copy of the earlier ``step``."""
        text = f"the copy of step {step} is not complete, but the checkpoint of step {stored} in the store is"
        self.failed(text)

    def _set(self, **changes: object) -> None:
        self.report = self.report.updated(**changes)
        self._publish(self.report)
