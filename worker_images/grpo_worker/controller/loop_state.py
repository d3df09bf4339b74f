"""State that the parts of the training loop share."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.weightsync.protocol.version import Version


class BackgroundWork:
    """Work of the last step that runs beside the next one, such as the staging of its weights."""

    def __init__(self) -> None:
        self._futures: list[Future[Any]] = []

    def add(self, work: "Future[Any]") -> None:
        """Add work that has begun."""
        self._futures.append(work)

    @property
    def done(self) -> bool:
        """True if all work has ended, even by an error."""
        return all(future.done() for future in self._futures)

    def futures(self) -> list[Future[Any]]:
        """Return all work since it was taken or finished last; any thread."""
        return list(self._futures)

    def take(self) -> list[Future[Any]]:
        """Return all work, and forget it."""
        taken, self._futures = self._futures, []
        return taken

    def finish(self) -> None:
        """Wait for the work, and forget it; raise its first error."""
        for future in self.take():
            future.result()


@dataclass(slots=True)
class LoopState:
    """The job as the loop has it now.

    ``spec``: follows the job's file, see LiveSpec. ``step``: number of finished steps.
    """

    spec: GRPOJobSpec
    step: int = 0
    background: BackgroundWork = field(default_factory=BackgroundWork)

    @property
    def version(self) -> Version:
        """Version of the trainers' weights: each finished step makes the next one."""
        return Version(self.step)
