"""The samples of a validation as rows of a table."""

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from grpo_worker.common.reward_parts import parts_of
from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.sampling import Sample
from grpo_worker.samples.table import SCHEMA, Decode, Origin, scores_of, table_of, table_of_refused

_PART_BYTES = 128  # of a name and a number in memory
_SET = pa.field("set", pa.string())
VALIDATION_SCHEMA = SCHEMA.insert(1, _SET)


@dataclass(frozen=True, slots=True)
class ValidatedGroup:
    """The responses to a prompt of a validation set, and their scores.

    ``set``: name of the set. ``first``: index of its first prompt. ``refused``: why engines refuse the
    prompt, which has no samples then.
    """

    set: str
    first: int
    prompt: Prompt
    samples: Sequence[Sample] = ()
    scores: Sequence[float] = ()
    refused: str = ""

    @property
    def place(self) -> int:
        """Index of the prompt in its set."""
        return self.prompt.index - self.first

    @property
    def rows(self) -> int:
        """Number of rows in the table."""
        return len(self.samples) or 1

    @property
    def bytes(self) -> int:
        """Bytes of the ids, log-probabilities and parts of scores."""
        parts = sum(len(parts_of(score)) for score in self.scores)
        tokens = sum(8 * len(sample.ids) for sample in self.samples)
        return 4 * len(self.prompt.ids) + tokens + _PART_BYTES * parts


def validation_table(origin: Origin, groups: Sequence[ValidatedGroup], decode: Decode) -> pa.Table:
    """Return the rows of groups, those of refused prompts last. ``decode``: as in ``tables``.

    ``prompt_index`` and ``uid`` count the prompts of each set from 0.
    """
    answered = [group for group in groups if not group.refused]
    refused = [group for group in groups if group.refused]
    parts = [part(origin, of, decode) for part, of in ((_answered, answered), (_refused, refused)) if of]
    return pa.concat_tables(parts)


def _answered(origin: Origin, groups: Sequence[ValidatedGroup], decode: Decode) -> pa.Table:
    rows = [(group, sample) for group in groups for sample in group.samples]
    scores = [score for group in groups for score in group.scores]
    own = {
        "uid": [f"{group.place}.{sample.number}" for group, sample in rows],
        "prompt_index": [group.place for group, _ in rows],
        "score": scores,
        **scores_of(scores),
    }
    table = table_of(origin, [sample for _, sample in rows], _prompts(groups), decode, own)
    return _with_set(table, [group for group, _ in rows])


def _refused(origin: Origin, groups: Sequence[ValidatedGroup], decode: Decode) -> pa.Table:
    reasons = {group.prompt.index: group.refused for group in groups}
    own = {"prompt_index": [group.place for group in groups]}
    return _with_set(table_of_refused(origin, reasons, _prompts(groups), decode, own), groups)


def _prompts(groups: Sequence[ValidatedGroup]) -> dict[int, Prompt]:
    return {group.prompt.index: group.prompt for group in groups}


def _with_set(table: pa.Table, groups: Sequence[ValidatedGroup]) -> pa.Table:
    return table.add_column(1, _SET, pa.array([group.set for group in groups], pa.string()))
