"""How a call on a worker group becomes calls on its ranks, and their results one result."""

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
    """Protocols, named as in verl."""

    ONE_TO_ALL = "same arguments to every rank; list of results in rank order"
    RANK_ZERO = "rank 0 alone; its result"
    DP_COMPUTE = "a batch split over all ranks, as if each were data-parallel; all results joined"
    MEGATRON_COMPUTE = (
        "a batch split over data-parallel ranks and repeated inside each; "
        "results of (tp 0, last pp, cp 0) joined"
    )
    MEGATRON_PP_AS_DP = (
        "a batch split over data-parallel ranks and pipeline stages, for work that needs no model "
        "parallelism; results of (tp 0, cp 0) joined"
    )

    @property
    def splits(self) -> bool:
        """Is the first argument a batch that ranks share out?"""
        return self not in (Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO)


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

    def slot(self, mode: Dispatch, world: int) -> tuple[int, int]:
        """(which part of the batch this rank gets, number of parts)."""
        if mode is Dispatch.DP_COMPUTE:
            return self.rank, world
        if mode is Dispatch.MEGATRON_PP_AS_DP:
            return self.dp_rank * self.pp_size + self.pp_rank, self.dp_size * self.pp_size
        return self.dp_rank, self.dp_size

    def collects(self, mode: Dispatch) -> bool:
        """Does this rank hold the result of its part?"""
        if mode is Dispatch.DP_COMPUTE:
            return True
        first = (self.tp_rank, self.cp_rank) == (0, 0)
        return first and (mode is Dispatch.MEGATRON_PP_AS_DP or self.pp_rank == self.pp_size - 1)


@dataclass(frozen=True, slots=True)
class Packed:
    """A TensorDict on its way between processes: Ray moves numpy arrays without copying them into a
    pickle, tensors not."""

    columns: dict[str, np.ndarray]
    rows: int

    @classmethod
    def of(cls, batch: TensorDict) -> "Packed":
        return cls({name: column.numpy() for name, column in batch.items()}, len(batch))

    def open(self) -> TensorDict:
        """A copy: what lies in Ray's store must not be written to."""
        columns = {name: torch.tensor(column) for name, column in self.columns.items()}
        return TensorDict(columns, batch_size=[self.rows])


def register(dispatch_mode: Dispatch) -> Callable[[F], F]:
    """Mark a worker method as callable from the controller.

    A method that gets part of a batch answers only on ranks whose answer counts; ``self.place`` is
    the rank's RankInfo.
    """

    def mark(function: F) -> F:
        @wraps(function)
        def on_rank(self: Any, batch: Packed, *args: Any, **kwargs: Any) -> Any:
            found = function(self, batch.open(), *args, **kwargs)
            if not self.place.collects(dispatch_mode):
                return None
            return Packed.of(found) if isinstance(found, TensorDict) else found

        marked: Any = on_rank if dispatch_mode.splits else function
        setattr(marked, _ATTRIBUTE, dispatch_mode)
        return marked  # type: ignore[no-any-return]

    return mark


def dispatch_mode(function: Callable[..., Any]) -> Dispatch | None:
    """The protocol of a method, or None when it is not registered."""
    mode = getattr(function, _ATTRIBUTE, None)
    return mode if isinstance(mode, Dispatch) else None


class BatchPartition:
    """One batch dealt out to ranks: equally many rows each, of about equal length in sum.

    Rows that are lacking for an even split are filled up with copies of the first ones, whose loss
    ``weights`` are 0; their results are dropped. ``part_of``: number of each rank's part.
    """

    def __init__(self, batch: TensorDict, ranks: Sequence[RankInfo], mode: Dispatch) -> None:
        self._ranks, self._mode = ranks, mode
        self._rows = batch.batch_size[0]
        if self._rows == 0:
            raise ValueError("a batch without rows cannot be dealt out")
        size = ranks[0].slot(mode, len(ranks))[1]
        whole = _filled_up(batch, -(-self._rows // size) * size)
        lengths = _lengths(whole)
        self._order = balanced(lengths, size, equal_size=True)
        self.parts = [Packed.of(whole[torch.tensor(rows)]) for rows in self._order]
        self.part_of = [info.slot(mode, len(ranks))[0] for info in ranks]

    def join(self, results: Sequence[Any]) -> Any:
        """Undo the deal: batches come back in the rows' order; of results of another kind that of the
        first part is taken."""
        chosen = sorted(
            (
                (info.slot(self._mode, len(self._ranks))[0], result)
                for info, result in zip(self._ranks, results, strict=True)
                if info.collects(self._mode)
            ),
            key=lambda item: item[0],
        )
        parts = [result for _, result in chosen]
        if not isinstance(parts[0], Packed):
            return parts[0]
        order = np.array([row for rows in self._order for row in rows])
        columns = {name: np.concatenate([p.columns[name] for p in parts]) for name in parts[0].columns}
        place = order.argsort()[: self._rows]
        return TensorDict(
            {name: torch.from_numpy(column[place]) for name, column in columns.items()},
            batch_size=[self._rows],
        )


def _filled_up(batch: TensorDict, rows: int) -> TensorDict:
    missing = rows - batch.batch_size[0]
    if missing == 0:
        return batch
    copies = batch[torch.arange(missing) % batch.batch_size[0]]
    if "weights" in copies.keys():  # noqa: SIM118 - a TensorDict iterates over rows
        copies["weights"] = torch.zeros_like(copies["weights"])
    whole: TensorDict = torch.cat([batch, copies])
    return whole


def _lengths(batch: TensorDict) -> list[int]:
    mask = batch.get("attention_mask", None)
    return [1] * batch.batch_size[0] if mask is None else [int(n) for n in mask.sum(1).tolist()]
