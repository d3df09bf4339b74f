"""How a call on a worker group becomes calls on its ranks, and their results one result."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch
from tensordict import TensorDict

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "_grpo_dispatch"


class Dispatch(Enum):
    """Protocols, named as in verl."""

    ONE_TO_ALL = "same arguments to every rank; list of results in rank order"
    RANK_ZERO = "rank 0 alone; its result"
    MEGATRON_COMPUTE = (
        "a batch split over data-parallel ranks and repeated inside each; "
        "results of (tp 0, last pp, cp 0) concatenated"
    )


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Place of one rank on Megatron-Core's axes."""

    rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    pp_size: int
    dp_size: int

    @property
    def collects(self) -> bool:
        """Does this rank hold a result of its data-parallel replica?"""
        return (self.tp_rank, self.cp_rank, self.pp_rank) == (0, 0, self.pp_size - 1)


def register(dispatch_mode: Dispatch) -> Callable[[F], F]:
    """Mark a worker method as callable from the controller."""

    def mark(function: F) -> F:
        setattr(function, _ATTRIBUTE, dispatch_mode)
        return function

    return mark


def dispatch_mode(function: Callable[..., Any]) -> Dispatch | None:
    """The protocol of a method, or None when it is not registered."""
    mode = getattr(function, _ATTRIBUTE, None)
    return mode if isinstance(mode, Dispatch) else None


def scatter(batch: TensorDict, ranks: Sequence[RankInfo]) -> list[TensorDict]:
    """One part per rank: rows split evenly over dp, the same part inside a replica.

    Raises ValueError when the rows do not divide: padding would change the loss.
    """
    size, rows = ranks[0].dp_size, batch.batch_size[0]
    if rows % size:
        raise ValueError(f"{rows} rows cannot be split over {size} data-parallel ranks")
    parts = batch.split(rows // size)
    return [parts[info.dp_rank] for info in ranks]


def gather(results: Sequence[Any], ranks: Sequence[RankInfo]) -> Any:
    """Undo ``scatter``: tensors are concatenated in dp order, other results come from dp 0."""
    chosen = sorted(
        ((info.dp_rank, r) for info, r in zip(ranks, results, strict=True) if info.collects),
        key=lambda item: item[0],
    )
    parts = [result for _, result in chosen]
    return torch.cat(parts) if isinstance(parts[0], torch.Tensor) else parts[0]
