"""What all verifiers share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from grpo_worker.data.tasks import Record


class RewardError(RuntimeError):
    """Answers could not be judged; the step must not go on with made-up rewards."""


@dataclass(frozen=True, slots=True)
class Item:
    """One answer, with what it is judged by.

    ``ids``: the answer's tokens. ``step``: how many steps the weights had been trained for.
    """

    index: int
    answer: str
    record: Record
    ids: tuple[int, ...] = ()
    step: int = 0

    def wire(self) -> dict[str, Any]:
        """Arguments of a verifier, named as in verl."""
        record = self.record
        return {
            "data_source": record.data_source,
            "ground_truth": record.ground_truth,
            "extra_info": record.extra_info,
            "solution_str": self.answer,
        }

    def request(self) -> dict[str, Any]:
        """What a function in any form can be called with; its process is sent the fields that it needs."""
        return self.wire() | {
            "prompt": self.record.prompt,
            "columns": self.record.columns,
            "completion_ids": self.ids,
            "step": self.step,
        }


class Verifier(Protocol):
    """Judges answers. ``failures``: how many it could not judge since it was made."""

    failures: int

    def check(self, item: Item) -> None:
        """Judge one answer before the job starts.

        Raises RewardError for whatever goes wrong, but ConnectionError for a server that is not up yet.
        """

    def score(self, items: Sequence[Item]) -> list[float]:
        """One reward an item, in order.

        Raises RewardError when the step must not go on, ConnectionError when a server has gone.
        """
