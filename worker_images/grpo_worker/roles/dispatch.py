"""Dispatch of a worker group's calls to its ranks, and collection of their results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import wraps
from typing import Any, TypeVar

import numpy as np

from grpo_worker.common.context_spans import ContextSplit
from grpo_worker.common.log_lines import LABELS
from grpo_worker.common.ragged_batch import (
    INPUT_IDS,
    ROUTED_EXPERTS,
    RaggedBatch,
    joined,
    spread_spans,
    take_spans,
)

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "_grpo_dispatch"
_READS = "_grpo_reads"
LENGTHS = "lengths"  # int32 [2, rows]: prompt tokens, and prompt and response tokens


class Dispatch(Enum):
    """Dispatch protocols, named as in verl."""

    ONE_TO_ALL = "same arguments for every rank; returns the list of results in rank order"
    RANK_ZERO = "rank 0 only; returns its result"
    MEGATRON_COMPUTE = (
        "batch split over data-parallel ranks, and rows over context-parallel ones; "
        "returns the results of (tp 0, last pp) joined"
    )


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Coordinates of one rank in Megatron-Core's process groups. ``packed``: it packs its sequences."""

    rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    pp_size: int
    dp_size: int
    tp_size: int = 1
    cp_size: int = 1
    packed: bool = False

    @property
    def last_stage(self) -> bool:
        """True if this rank computes the loss."""
        return self.pp_rank == self.pp_size - 1

    @property
    def collected(self) -> bool:
        """True if the controller takes response columns from this rank; see ``collect``."""
        return self.tp_rank == 0 and self.last_stage

    def reads(self, columns: Sequence[str]) -> list[str]:
        """Return those of a call's columns that this rank reads.

        Token ids are the input of the first stage and the labels of the last one; every stage routes; only
        the last one computes a loss.
        """
        ends = self.pp_rank == 0 or self.last_stage
        return [
            name
            for name in columns
            if name == ROUTED_EXPERTS or (ends if name == INPUT_IDS else self.last_stage)
        ]

    def split(self, width: int) -> ContextSplit | None:
        """Return the part of each row that a context-parallel rank reads; None: whole rows.

        It reads the ids of some tokens, and reads and returns the entries of response columns for those that
        its outputs predict. ``width``: of the batch.
        """
        if self.cp_size == 1:
            return None
        return ContextSplit(self.tp_size, self.cp_size, self.cp_rank, None if self.packed else width)


@dataclass(frozen=True, slots=True)
class PieceColumns:
    """Names of the columns that a call gets, in the order of its arrays, for each piece of the rank's rows.

    ``response``, ``row``: names by kind. The arrays of a piece begin with ``LENGTHS``. ``split``: see
    RankInfo. ``step``: of the job, which labels the rank's log lines from this call on.
    """

    pieces: int
    width: int
    ids: bool
    response: tuple[str, ...]
    row: tuple[str, ...]
    split: ContextSplit | None = None
    step: int | None = None

    def batch(self, arrays: Sequence[np.ndarray]) -> RaggedBatch:
        """Return the rank's rows as views of the arrays; several pieces, and parts of rows, are copied."""
        count = 1 + self.ids + len(self.response) + len(self.row)
        return joined([self._piece(arrays[i * count : (i + 1) * count]) for i in range(self.pieces)])

    def _piece(self, arrays: Sequence[np.ndarray]) -> RaggedBatch:
        (prompts, lengths), rest = arrays[0], list(arrays[1:])
        ids = rest.pop(0) if self.ids else None
        if ids is not None and self.split is not None:
            ids = spread_spans(ids, lengths, np.zeros_like(lengths), self.split.read(lengths))
        response = dict(zip(self.response, rest, strict=False))
        if self.split is not None:
            own = self.split.predicted(lengths)
            response = {
                name: spread_spans(taken, lengths - prompts, prompts, own) for name, taken in response.items()
            }
        row = dict(zip(self.row, rest[len(self.response) :], strict=True))
        return RaggedBatch(prompts, lengths, self.width, ids, response, row)


@dataclass(frozen=True, slots=True)
class Columns:
    """Results of a rank for its rows, in their order. ``response``, ``row``: see RaggedBatch.

    Row columns are the same on all context-parallel ranks.
    """

    response: dict[str, np.ndarray] = field(default_factory=dict)
    row: dict[str, np.ndarray] = field(default_factory=dict)


def collect(info: RankInfo, batch: RaggedBatch, result: Any) -> Any:
    """Return what the controller takes of a rank's result: no value that another rank sends too.

    Response columns are cut to the tokens whose loss the rank computes. Everything else comes from
    context-parallel rank 0.
    """
    if not info.collected:
        return None
    first = info.cp_rank == 0
    if not isinstance(result, Columns):
        return result if first else None
    split = info.split(batch.width)
    if split is None:
        return result
    rows, spans = range(batch.rows), split.predicted(batch.lengths)
    own = {
        name: take_spans(column, batch.response_lengths, batch.prompt_lengths, rows, spans)
        for name, column in result.response.items()
    }
    return Columns(own, result.row if first else {})


def register(dispatch_mode: Dispatch, reads: Sequence[str] = ()) -> Callable[[F], F]:
    """Mark a worker method as callable from the controller.

    ``reads``: columns that a method with a split batch reads, where the batch has them. Such a method returns
    what ``collect`` leaves of its result. The worker must have a RankInfo as ``self.rank_info``.
    """

    def mark(function: F) -> F:
        @wraps(function)
        def on_rank(self: Any, columns: PieceColumns, args: Sequence[Any], *arrays: np.ndarray) -> Any:
            LABELS.step = columns.step
            batch = columns.batch(arrays)
            return collect(self.rank_info, batch, function(self, batch, *args))

        del on_rank.__wrapped__  # Ray would check arguments by its signature
        marked: Any = on_rank if dispatch_mode is Dispatch.MEGATRON_COMPUTE else function
        setattr(marked, _ATTRIBUTE, dispatch_mode)
        setattr(marked, _READS, tuple(reads))
        return marked  # type: ignore[no-any-return]

    return mark


def dispatch_mode(function: Callable[..., Any]) -> Dispatch | None:
    """Return the protocol of a method, or None when it is not registered."""
    mode = getattr(function, _ATTRIBUTE, None)
    return mode if isinstance(mode, Dispatch) else None


def reads_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the columns that a registered method reads."""
    return tuple(getattr(function, _READS, ()))
