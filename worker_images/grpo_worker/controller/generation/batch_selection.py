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

    The batch consists of the first ``size`` useful groups in the order of the prompts. A group is replaced
    by the next prompt when it is known to be useless or refused, and no earlier. When all groups that were
    started are known, their number is therefore the same for every order of arrival: the shortest run of
    prompts that contains ``size`` useful ones. No group is left out because it is slow, so lengths have no
    influence.

    With ``spare`` prompts (over-sampling) the batch is complete with the first ``size`` useful groups in
    the order of arrival. The others are cut: they belong to the next step, in which they are ``awaited``. A
    prompt is therefore trained on at most one step later, however long its responses are.
    """

    def __init__(
        self,
        size: int,
        most: int,
        filtered: bool,
        refusals: int,
        spare: int = 0,
        awaited: frozenset[int] = frozenset(),
    ) -> None:
        """``size``: groups of the batch. ``most``: groups to generate; useless ones then fill the batch.

        ``filtered``: groups of equal scores are useless. ``refusals``: prompts that engines may refuse.
        ``awaited``: indices of the prompts that were cut in the step before, at most ``size``.
        """
        self._size, self._most, self._filtered, self._refusals = size, most, filtered, refusals
        self._spare, self._awaited = spare, awaited
        self._started: list[Prompt] = []
        self._scored: dict[int, _Scored] = {}  # in the order of arrival
        self._refused: dict[int, str] = {}

    @property
    def missing(self) -> int:
        """Number of prompts to start now."""
        if self.complete and self._started:
            return 0
        useless = sum(not group.useful for group in self._scored.values())
        groups = min(self._size + useless, self._most) + self._spare
        return groups + len(self._refused) - len(self._started)

    @property
    def count(self) -> int:
        """Number of prompts that were started."""
        return len(self._started)

    @property
    def complete(self) -> bool:
        """True if the batch is known: it has its groups, or no further ones can be started."""
        unknown = {p.index for p in self._started} - self._scored.keys() - self._refused.keys()
        if unknown & self._awaited or not self._started:
            return False
        useful = sum(group.useful for group in self._scored.values())
        return useful >= self._size or (not unknown and len(self._scored) >= self._most + self._spare)

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
        """Return the batch of a complete selection. Cut prompts are not among those that it has taken."""
        chosen, left_out = self._chosen()
        prompts = {prompt.index: prompt for prompt in self._started}
        result = RolloutBatch(refused=dict(self._refused))
        for index in chosen:
            result.prompts.append(prompts[index])
            result.samples += self._scored[index].samples
            result.scores += self._scored[index].scores
        for index in left_out:
            result.left_out += self._scored[index].samples
        used = {*chosen, *left_out, *self._refused}
        result.taken = [prompt for prompt in self._started if prompt.index in used]
        return result

    def cut(self) -> list[Prompt]:
        """Return the prompts that a complete selection leaves to the next step, in order."""
        used = {prompt.index for prompt in self.batch().taken}
        return [prompt for prompt in self._started if prompt.index not in used]

    def _chosen(self) -> tuple[list[int], list[int]]:
        """Return the indices of the batch's groups, useful ones first, and of those left out."""
        order = {prompt.index: place for place, prompt in enumerate(self._started)}
        useful = [index for index, group in self._scored.items() if group.useful]
        useful.sort(key=lambda index: index not in self._awaited)  # stable: else in the order of arrival
        chosen = sorted(useful[: self._size], key=order.__getitem__)
        useless = sorted(self._scored.keys() - set(useful), key=order.__getitem__)
        missing = self._size - len(chosen)
        return chosen + useless[:missing], useless[missing:]
