"""Types that all verifiers share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from grpo_worker.data.tasks import Record


class RewardError(RuntimeError):
    """Answers could not be judged; the step must not continue with invented rewards."""


@dataclass(frozen=True, slots=True)
class Item:
    """An answer and the record by which it is judged.

    ``ids``: the answer's tokens. ``step``: number of training steps of the weights that generated it.
    """

    index: int
    answer: str
    record: Record
    ids: Sequence[int] = ()
    step: int = 0

    def wire(self) -> dict[str, Any]:
        """Return the arguments of a verifier, named as in verl."""
        record = self.record
        return {
            "data_source": record.data_source,
            "ground_truth": record.ground_truth,
            "extra_info": record.extra_info,
            "solution_str": self.answer,
        }

    def request(self) -> dict[str, Any]:
        """Return all fields that any call form uses; the reward process receives those that it needs."""
        return self.wire() | {
            "prompt": self.record.prompt,
            "columns": self.record.columns,
            "completion_ids": self.ids,
            "step": self.step,
        }


class Verifier(Protocol):
    """Judge of answers. Threads may call it at the same time.

    ``failures``: number of answers that could not be judged so far.
    """

    failures: int

    @property
    def reads_answers(self) -> bool:
        """False if the items' answers may be empty."""

    @property
    def needs_groups(self) -> bool:
        """True if ``score`` must get all answers to a prompt in one call."""

    def check(self, item: Item) -> None:
        """Judge one answer before the job starts.

        Raises RewardError for any failure, except ConnectionError for a server that is not up yet. It has a
        ConnectionError as its cause if the function's process did not start for a reason outside of it.
        """

    def score(self, items: Sequence[Item]) -> list[float]:
        """Return one reward per item, in order; a Reward where it has named parts.

        Raises RewardError when the step must not continue, ConnectionError when a server is unreachable or
        a function's process does not start, which waiting may change.
        """
