"""Groups that were given up because no engine served them, until their prompts are submitted again."""

import asyncio
from collections.abc import Sequence

from grpo_worker.rollout.sampling import Sample
from grpo_worker.rollout.unfinished import Unfinished

Part = Sample | Unfinished  # of a group, by the number of the sample


class GivenUp:
    """Samples and tokens of these groups, so that an outage of all engines costs time and no work."""

    def __init__(self) -> None:
        self._groups: dict[int, tuple[int, list[Part]]] = {}  # by prompt: the version and the parts

    def keep(
        self, prompt: int, version: int, parts: Sequence[Part], tasks: Sequence[asyncio.Task[Sample]]
    ) -> None:
        """Keep what the ended ``tasks`` have made of ``parts``."""
        self._groups[prompt] = version, [_made(*pair) for pair in zip(parts, tasks, strict=True)]

    def take(self, prompt: int, version: int) -> list[Part] | None:
        """Return the parts of a prompt's group, once; None if there are none of this version."""
        kept, parts = self._groups.pop(prompt, (None, None))
        return parts if kept == version else None

    def forget(self) -> None:
        """Forget all groups: another gang makes the next weights."""
        self._groups.clear()


def _made(part: Part, task: asyncio.Task[Sample]) -> Part:
    if not task.cancelled() and task.exception() is None:
        return task.result()
    if isinstance(part, Unfinished):
        part.cut()
    return part
