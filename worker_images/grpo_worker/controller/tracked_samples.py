"""Samples that trackers of experiments show: a bounded number of each step and of each validation (pure)."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.common.reward_parts import parts_of
from grpo_worker.data.prompts import Prompt
from grpo_worker.metrics.sinks.base import SampleTable
from grpo_worker.rollout.batch_file import RolloutBatch
from grpo_worker.rollout.sampling import Sample
from grpo_worker.run_page.sample_choice import ranked_answers
from grpo_worker.samples.table import Decode
from grpo_worker.samples.validation_table import ValidatedGroup

COLUMNS = (
    "step", "set", "prompt", "response", "score", "reward_parts", "advantage", "response_tokens", "version",
)  # fmt: skip
_CHARACTERS = 4096  # of a prompt or a response


@dataclass(frozen=True, slots=True)
class Tracked:
    """A sample with its prompt. ``advantage``: None for a validation's. ``set``: "" for a training step's."""

    prompt: Prompt
    sample: Sample
    score: float
    parts: dict[str, float]
    advantage: float | None = None
    set: str = ""


def chosen_of_step(
    rollouts: RolloutBatch, scores: Sequence[float], batch: RaggedBatch, most: int
) -> list[Tracked]:
    """Return at most ``most`` samples on which a step has trained, the best first, at equal distances.

    Arguments: see StepSamples.
    """
    prompts = {prompt.index: prompt for prompt in (*rollouts.taken, *rollouts.prompts)}
    advantages = batch.row.get("advantages")
    return [
        Tracked(
            prompts[rollouts.samples[row].prompt_index],
            rollouts.samples[row],
            float(scores[row]),
            dict(parts_of(rollouts.scores[row])),
            None if advantages is None else float(advantages[row]),
        )
        for row in ranked_answers(scores, most)
    ]


class FirstSamples:
    """Keeps the first response to each of the first prompts of each set: the same ones of each version."""

    def __init__(self, most: int) -> None:
        """``most``: prompts of each set."""
        self._most = most
        self._asked: dict[str, list[int]] = {}
        self._kept: dict[int, Tracked] = {}

    def begin(self) -> None:
        """Begin another validation."""
        self._asked, self._kept = {}, {}

    def asked(self, of: str, prompt: int) -> None:
        """Note that engines are asked for responses to a prompt of the set ``of``."""
        wanted = self._asked.setdefault(of, [])
        if len(wanted) < self._most:
            wanted.append(prompt)

    def add(self, group: ValidatedGroup) -> None:
        """Keep the first response of a group, if it is wanted."""
        if group.prompt.index in self._asked[group.set] and group.samples:
            first = min(range(len(group.samples)), key=lambda at: group.samples[at].number)
            score = group.scores[first]
            self._kept[group.prompt.index] = Tracked(
                group.prompt, group.samples[first], float(score), dict(parts_of(score)), set=group.set
            )

    def samples(self) -> list[Tracked]:
        """Return what is kept, in the order in which it was asked for."""
        return [
            self._kept[prompt] for asked in self._asked.values() for prompt in asked if prompt in self._kept
        ]


def sample_table(name: str, step: int, samples: Sequence[Tracked], decode: Decode) -> SampleTable:
    """Return samples as a table. ``decode``: returns the texts of lists of token ids."""
    prompts = decode([one.prompt.ids for one in samples])
    responses = decode([list(one.sample.ids) for one in samples])
    rows = [
        (
            step,
            one.set or "train",
            _cut(prompt),
            _cut(response),
            one.score,
            json.dumps(one.parts) if one.parts else None,
            one.advantage,
            len(one.sample.ids),
            one.sample.version,
        )
        for one, prompt, response in zip(samples, prompts, responses, strict=True)
    ]
    return SampleTable(name, step, COLUMNS, rows)


def _cut(text: str) -> str:
    """Return a text without the middle of a long one: it begins with the task, and ends with the result."""
    if len(text) <= _CHARACTERS:
        return text
    half = _CHARACTERS // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"
