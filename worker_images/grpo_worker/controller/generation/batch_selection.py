"""Choice of the groups that form a step's batch, whatever the order in which they arrive (pure)."""

from dataclasses import dataclass

import numpy as np

from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import PromptRefusedError, Sample, UnfitEngineError


@dataclass(frozen=True, slots=True)
class _Scored:
    samples: list[Sample]
    scores: list[float]
    useful: bool


class BatchSelection:
    """Prompts that were started for a step, in order, and their groups.

    The batch consists of the first ``size`` useful groups in the order of the prompts. A group is replaced by
    the next prompt when it is known to be useless or refused, and no earlier. When all groups that were
    started are known, their number is therefore the same for every order of arrival: the shortest run of
    prompts that contains ``size`` useful ones. No group is left out because it is slow, so lengths have
    no influence.
    """

    def __init__(self, size: int, most: int, filtered: bool, refusals: int) -> None:
        """``size``: groups of the batch. ``most``: groups to generate; useless ones then fill the batch.

        ``filtered``: groups of equal scores are useless. ``refusals``: prompts that engines may refuse.
        """
        self._size, self._most, self._filtered, self._refusals = size, most, filtered, refusals
        self._started: list[Prompt] = []
        self._scored: dict[int, _Scored] = {}
        self._refused: dict[int, str] = {}

    @property
    def missing(self) -> int:
        """Number of prompts to start now."""
        useless = sum(not group.useful for group in self._scored.values())
        groups = min(self._size + useless, self._most)
        return groups + len(self._refused) - len(self._started)

    @property
    def count(self) -> int:
        """Number of prompts that were started."""
        return len(self._started)

    @property
    def complete(self) -> bool:
        """Whether the batch is known: every prompt has its scores or was refused, and none is missing."""
        return self.missing == 0 and self.count == len(self._scored) + len(self._refused)

    def start(self, prompts: list[Prompt]) -> None:
        """Add prompts, which were drawn in this order."""
        self._started += prompts

    def add(self, prompt: Prompt, samples: list[Sample], scores: list[float]) -> None:
        """Add the scored group of a prompt."""
        useful = not self._filtered or bool(np.ptp(scores) > 0)
        self._scored[prompt.index] = _Scored(samples, scores, useful)

    def refuse(self, error: PromptRefusedError) -> None:
        """Drop a prompt that engines refuse. Raises UnfitEngineError when they refuse too many."""
        self._refused[error.prompt.index] = str(error)
        if len(self._refused) > self._refusals:
            raise UnfitEngineError(
                f"{error}; {len(self._refused)} prompts of this step were refused, "
                f"data.maxRefusedShare allows {self._refusals}"
            ) from error

    def batch(self) -> RolloutBatch:
        """Return the batch of a complete selection."""
        result = RolloutBatch(taken=list(self._started), refused=dict(self._refused))
        known = [(p, self._scored[p.index]) for p in self._started if p.index in self._scored]
        for prompt, group in sorted(known, key=lambda item: not item[1].useful):  # stable: keeps their order
            if len(result.prompts) < self._size:
                result.prompts.append(prompt)
                result.samples += group.samples
                result.scores += group.scores
            else:
                result.left_out += group.samples
        return result
