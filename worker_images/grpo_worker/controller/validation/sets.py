"""Prompts and rewards of the validation sets."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_operator.api.v1alpha1.data import DataSpec, RewardSpec
from grpo_operator.api.v1alpha1.validation import ValidationSetSpec, ValidationSpec
from grpo_worker.controller.generation.group import Scorer, Scores
from grpo_worker.data.prompts import TRIES, Prompt
from grpo_worker.data.tasks import Task
from grpo_worker.data.tokenizer import TextTokenizer
from grpo_worker.rewards.answers import AnswerWorker, Workers
from grpo_worker.rewards.manager import open_reward
from grpo_worker.rollout.sampling import Sample

_GENERATED = 256  # prompts of a source that has no end
# Prompts of set n have the indices from (n + 1) x _INDICES, which no prompt that is trained on has: samples
# of both are on their way at the same time.
_INDICES = 2**40
# A source that generates prompts draws those of a validation from another seed than those of the training.
_OTHER_SEED = 2**31 - 1
OpenTask = Callable[[DataSpec, TextTokenizer, int, Path], Task]
StartWorkers = Callable[[AnswerWorker, int], Workers]


class OwnIndices:
    """Scorer of a set's samples, whose prompts have indices behind ``first``."""

    def __init__(self, reward: Scorer, first: int) -> None:
        self._reward, self._first = reward, first

    @property
    def needs_groups(self) -> bool:
        """True if the samples of a group must be judged in one call."""
        return self._reward.needs_groups

    def start(self, samples: Sequence[Sample]) -> Scores:
        """Start to judge samples of one group; the result is one reward per sample, in order."""
        return self._reward.start(
            [replace(sample, prompt_index=sample.prompt_index - self._first) for sample in samples]
        )


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """Prompts of one set, the same ones at each call, and the reward of their responses.

    ``size``: number of prompts. ``limit``: longest prompt in tokens; longer ones are passed over.
    """

    name: str
    task: Task
    tokenizer: TextTokenizer
    reward: Scorer
    first: int
    size: int
    limit: int

    def prompts(self) -> Iterator[Prompt]:
        """Yield the prompts, each read when it is asked for.

        Raises ValueError when none of TRIES consecutive prompts fits.
        """
        found = passed = 0
        for index in range(self.size * TRIES):
            if found == self.size:
                return
            ids = tuple(self.task.prompt(index, self.tokenizer))
            if len(ids) <= self.limit:
                found, passed = found + 1, 0
                yield Prompt(self.first + index, ids)
                continue
            passed += 1
            if passed == TRIES:
                raise ValueError(
                    f"spec.data.promptLength={self.limit}: none of {TRIES} consecutive prompts of "
                    f"spec.validation.sets {self.name} fits: raise it, or choose another source"
                )


def open_sets(
    spec: ValidationSpec | None, data: DataSpec, reward: RewardSpec | None, tokenizer: TextTokenizer,
    seed: int, cache: Path, open_task: OpenTask, start_workers: StartWorkers,
) -> tuple[ValidationSet, ...]:  # fmt: skip
    """Open all sets, and call the reward of each once.

    ``data``, ``reward``, ``seed``: of the job. ``cache``: folder for tokenised files. ``start_workers``: see
    open_reward; the processes that a job may have are divided among the sets.

    Raises ValueError or RewardError that names the problem.
    """
    if spec is None:
        return ()
    if reward is not None:
        reward = reward.model_copy(update={"workers": max(1, reward.workers // len(spec.sets))})
    opened = []
    with ExitStack() as stack:
        for number, one in enumerate(spec.sets):
            task = _open(
                f"spec.validation.sets[{number}].data", open_task, _data(data, one), tokenizer, seed, cache
            )
            manager = open_reward(task, tokenizer, reward, start_workers)
            stack.callback(manager.close)
            manager.check()
            first = (number + 1) * _INDICES
            scorer, size = OwnIndices(manager, first), _size(one, task)
            found = ValidationSet(one.name, task, tokenizer, scorer, first, size, data.prompt_length)
            next(found.prompts())
            opened.append(found)
        stack.pop_all()
    return tuple(opened)


def _open(
    field: str, open_task: OpenTask, data: DataSpec, tokenizer: TextTokenizer, seed: int, cache: Path
) -> Task:
    try:
        return open_task(data, tokenizer, seed ^ _OTHER_SEED, cache)
    except ValueError as error:
        raise ValueError(str(error).replace("spec.data.train", field)) from error


def _data(data: DataSpec, one: ValidationSetSpec) -> DataSpec:
    return data.model_copy(update={"train": one.data, "filter": None, "order": None})


def _size(one: ValidationSetSpec, task: Task) -> int:
    if task.counts is None:
        return one.prompts or _GENERATED
    return min(one.prompts or task.counts.rows, task.counts.rows)
