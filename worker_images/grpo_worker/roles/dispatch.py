"""Dispatch of a worker group's calls to its ranks, and collection of their results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import torch
from tensordict import TensorDict

from grpo_worker.data.balance import balanced

F = TypeVar("F", bound=Callable[..., Any])
_ATTRIBUTE = "_grpo_dispatch"


class Dispatch(Enum):
    """Dispatch protocols, named as in verl."""

    ONE_TO_ALL = "same arguments for every rank; returns the list of results in rank order"
    RANK_ZERO = "rank 0 only; returns its result"
    DP_COMPUTE = "batch split over all ranks, as if each were data-parallel; returns all results joined"
    MEGATRON_COMPUTE = (
        "batch split over data-parallel ranks, the same part for all ranks of a replica; "
        "returns the results of (tp 0, last pp, cp 0) joined"
    )
    MEGATRON_PP_AS_DP = (
        "batch split over data-parallel ranks and pipeline stages, for work that needs no model "
        "parallelism; returns the results of (tp 0, cp 0) joined"
    )

    @property
    def splits(self) -> bool:
        """True if the first argument is a batch that is split among the ranks."""
        return self not in (Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Coordinates of one rank in Megatron-Core's process groups."""

    rank: int
    tp_rank: int
    pp_rank: int
    cp_rank: int
    dp_rank: int
    pp_size: int
    dp_size: int

    def slot(self, mode: Dispatch, world: int) -> tuple[int, int]:
        """Return (index of this rank's part of the batch, number of parts)."""
        if mode is Dispatch.DP_COMPUTE:
            return self.rank, world
        if mode is Dispatch.MEGATRON_PP_AS_DP:
            return self.dp_rank * self.pp_size + self.pp_rank, self.dp_size * self.pp_size
        return self.dp_rank, self.dp_size

    def collects(self, mode: Dispatch) -> bool:
        """Return whether the controller takes the result of a part from this rank."""
        if mode is Dispatch.DP_COMPUTE:
            return True
        first = (self.tp_rank, self.cp_rank) == (0, 0)
        return first and (mode is Dispatch.MEGATRON_PP_AS_DP or self.pp_rank == self.pp_size - 1)


@dataclass(frozen=True, slots=True)
class Packed:
    """A TensorDict in the form in which it is sent between processes.

    Ray transfers numpy arrays without copying them into a pickle, but not tensors.
    """

    columns: dict[str, np.ndarray]
    rows: int

    @classmethod
    def of(cls, batch: TensorDict) -> "Packed":
        """Convert a batch on the host, without a copy."""
        return cls({name: column.numpy() for name, column in batch.items()}, len(batch))

    def unpack(self) -> TensorDict:
        """Return a copy as a TensorDict; arrays in Ray's object store are read-only."""
        columns = {name: torch.tensor(column) for name, column in self.columns.items()}
        return TensorDict(columns, batch_size=[self.rows])


def register(dispatch_mode: Dispatch) -> Callable[[F], F]:
    """Mark a worker method as callable from the controller.

    A method with a split batch returns None on ranks from which the controller takes no result. The worker
    must have a RankInfo as ``self.rank_info``.
    """

    def mark(function: F) -> F:
        @wraps(function)
        def on_rank(self: Any, batch: Packed, *args: Any, **kwargs: Any) -> Any:
            result = function(self, batch.unpack(), *args, **kwargs)
            if not self.rank_info.collects(dispatch_mode):
                return None
            return Packed.of(result) if isinstance(result, TensorDict) else result

        marked: Any = on_rank if dispatch_mode.splits else function
        setattr(marked, _ATTRIBUTE, dispatch_mode)
        return marked  # type: ignore[no-any-return]

    return mark


def dispatch_mode(function: Callable[..., Any]) -> Dispatch | None:
    """Return the protocol of a method, or None when it is not registered."""
    mode = getattr(function, _ATTRIBUTE, None)
    return mode if isinstance(mode, Dispatch) else None


class BatchPartition:
    """A batch split into parts with equal numbers of rows and similar numbers of tokens.

    The batch is padded with copies of its first rows to a multiple of the number of parts; their loss
    ``weights`` are 0 and their results are dropped. ``part_of``: index of each rank's part.
    """

    def __init__(self, batch: TensorDict, ranks: Sequence[RankInfo], mode: Dispatch) -> None:
        self._ranks, self._mode = ranks, mode
        self._rows = batch.batch_size[0]
        if self._rows == 0:
            raise ValueError("a batch without rows cannot be split")
        size = ranks[0].slot(mode, len(ranks))[1]
        padded = _padded(batch, -(-self._rows // size) * size)
        self._order = balanced(_lengths(padded), size, equal_size=True)
        self.parts = [Packed.of(padded[torch.tensor(rows)]) for rows in self._order]
        self.part_of = [info.slot(mode, len(ranks))[0] for info in ranks]

    def join(self, results: Sequence[Any]) -> Any:
        """Join the ranks' results in the batch's row order; results that are no batches: return the first."""
        collected = sorted(
            (
                (info.slot(self._mode, len(self._ranks))[0], result)
                for info, result in zip(self._ranks, results, strict=True)
                if info.collects(self._mode)
            ),
            key=lambda item: item[0],
        )
        parts = [result for _, result in collected]
        if not isinstance(parts[0], Packed):
            return parts[0]
        order = np.array([row for rows in self._order for row in rows])
        columns = {name: np.concatenate([p.columns[name] for p in parts]) for name in parts[0].columns}
        source = order.argsort()[: self._rows]
        return TensorDict(
            {name: torch.from_numpy(column[source]) for name, column in columns.items()},
            batch_size=[self._rows],
        )


def _padded(batch: TensorDict, rows: int) -> TensorDict:
    missing = rows - batch.batch_size[0]
    if missing == 0:
        return batch
    copies = batch[torch.arange(missing) % batch.batch_size[0]]
    if "weights" in copies.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        copies["weights"] = torch.zeros_like(copies["weights"])
    padded: TensorDict = torch.cat([batch, copies])
    return padded


def _lengths(batch: TensorDict) -> list[int]:
    mask = batch.get("attention_mask", None)
    return [1] * batch.batch_size[0] if mask is None else [int(n) for n in mask.sum(1).tolist()]
