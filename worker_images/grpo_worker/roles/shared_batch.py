"""A step's batch, shared by all calls of the step: each part of a column is stored once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grpo_worker.common.context_spans import ContextSplit
from grpo_worker.common.ragged_batch import INPUT_IDS, RaggedBatch, entries_in, offsets_of
from grpo_worker.data.balance import balanced
from grpo_worker.roles.dispatch import LENGTHS, Columns, PieceColumns, RankInfo

WEIGHTS = "weights"  # row column: weight of the row's response tokens in the loss
_SMALL = 100 << 10  # bytes; Ray sends such a result through the caller, so passing it on would save nothing


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """Object store of the pods that read a batch.

    ``put``: stores an array in the controller's pod and returns its reference. ``pass_on``: takes a rank and
    a reference, and returns the reference of a copy in the rank's pod, from which other pods fetch it.
    ``pods``: pod of each rank.
    """

    put: Callable[[np.ndarray], Any]
    pass_on: Callable[[int, Any], Any]
    pods: Sequence[str]

    def store(self, array: np.ndarray, reader: int) -> "StoredArray":
        """Store an array that the rank ``reader`` is the first one to read."""
        return StoredArray(self, self.put(array), array.nbytes, reader)


@dataclass(slots=True)
class StoredArray:
    """An array in the object store, which leaves the controller's pod once.

    The pod of its first reader fetches it from the controller's pod; the other pods fetch a copy from there.
    """

    store: ObjectStore
    reference: Any
    nbytes: int
    reader: int
    copy: Any = None

    def for_rank(self, rank: int) -> Any:
        """Return the reference that a rank reads."""
        if self.nbytes <= _SMALL or self.store.pods[rank] == self.store.pods[self.reader]:
            return self.reference
        if self.copy is None:
            self.copy = self.store.pass_on(self.reader, self.reference)
        return self.copy


class Partition:
    """Rows of a batch by optimizer step and data-parallel rank.

    ``pieces``: [optimizer step][data-parallel rank] -> rows, equally many of each rank and with similar
    numbers of tokens. A step's rows are padded to a multiple of the number of ranks with copies of its first
    rows; ``real`` is False for them.
    """

    def __init__(self, lengths: np.ndarray, per_step: int, ranks: int) -> None:
        if len(lengths) == 0:
            raise ValueError("a batch without rows cannot be split")
        self.pieces: list[list[np.ndarray]] = []
        self.real: list[list[np.ndarray]] = []
        for first in range(0, len(lengths), per_step):
            rows = np.arange(first, min(first + per_step, len(lengths)))
            count = -(-len(rows) // ranks) * ranks
            padded = np.resize(rows, count)
            groups = [np.array(g) for g in balanced(lengths[padded].tolist(), ranks, equal_size=True)]
            self.pieces.append([padded[group] for group in groups])
            self.real.append([group < len(rows) for group in groups])


class SharedBatch:
    """A batch and its columns in an object store.

    A column is put part by part when a call first reads it, and every later call refers to the same objects;
    ranks of one pod map them without a copy. Columns that are added between two calls are put on their own.
    """

    def __init__(
        self, batch: RaggedBatch, per_step: int, ranks: Sequence[RankInfo], store: ObjectStore
    ) -> None:
        """``per_step``: rows of one optimizer step."""
        self.batch, self.per_step = batch, per_step
        self.partition = Partition(batch.lengths, per_step, ranks[0].dp_size)
        self.ranks, self._store = ranks, store
        self._stored: dict[tuple[int, int, str, ContextSplit | None], StoredArray] = {}
        self.put_bytes = 0
        self.step: int | None = None  # of the job, for the log lines of the ranks

    def all(self) -> "SharedRows":
        """Return the rows of all optimizer steps."""
        return SharedRows(self, range(len(self.partition.pieces)))

    def each_step(self) -> list["SharedRows"]:
        """Return the rows of each optimizer step."""
        return [SharedRows(self, [step]) for step in range(len(self.partition.pieces))]

    def stored(self, step: int, info: RankInfo, name: str) -> Any:
        """Return the reference of a rank's part of a column, which is stored if this is its first use."""
        key = step, info.dp_rank, name, self._split(info, name)
        if key not in self._stored:
            array = self._array(*key)
            self.put_bytes += array.nbytes
            self._stored[key] = self._store.store(array, info.rank)
        return self._stored[key].for_rank(info.rank)

    def _split(self, info: RankInfo, name: str) -> ContextSplit | None:
        whole = name != INPUT_IDS and name not in self.batch.response
        return None if whole else info.split(self.batch.width)

    def _array(self, step: int, part: int, name: str, split: ContextSplit | None) -> np.ndarray:
        rows, batch = self.partition.pieces[step][part], self.batch
        if name == LENGTHS:
            return np.stack([batch.prompt_lengths[rows], batch.lengths[rows]])
        spans = None
        if split is not None:
            spans = (split.read if name == INPUT_IDS else split.predicted)(batch.lengths)
        column = batch.take_column(name, rows, spans)
        return column * self.partition.real[step][part] if name == WEIGHTS else column


class SharedRows:
    """Rows of some optimizer steps of a shared batch: the argument of a call."""

    def __init__(self, shared: SharedBatch, steps: Sequence[int]) -> None:
        self._shared, self._steps = shared, steps

    def arguments(self, info: RankInfo, reads: Sequence[str]) -> tuple[PieceColumns, list[Any]]:
        """Return the names and references of the columns that one rank gets. ``reads``: of the call."""
        batch = self._shared.batch
        names = [name for name in info.reads(reads) if batch.column(name) is not None]
        response = tuple(name for name in names if name in batch.response)
        row = tuple(name for name in names if name in batch.row)
        ids = [name for name in names if name == INPUT_IDS]
        split = info.split(batch.width)
        columns = PieceColumns(
            len(self._steps), batch.width, bool(ids), response, row, split, self._shared.step
        )
        order = [LENGTHS, *ids, *response, *row]
        return columns, [self._shared.stored(s, info, name) for s in self._steps for name in order]

    def join(self, results: Sequence[Any]) -> Any:
        """Join the results of the ranks in the rows' order; results that are no columns: return the first.

        results: in rank order, as ``dispatch.collect`` leaves them.
        """
        collected = {
            (info.dp_rank, info.cp_rank): (info, result)
            for info, result in zip(self._shared.ranks, results, strict=True)
            if info.collected
        }
        first = collected[0, 0][1]
        if not isinstance(first, Columns):
            return first
        parts = {info.dp_rank: self._rows(info.dp_rank) for info, _ in collected.values()}
        wanted = np.unique(np.concatenate([rows for rows, _ in parts.values()]))
        lengths = self._shared.batch.response_lengths
        places = np.full(len(lengths), -1)
        places[wanted] = np.arange(len(wanted))
        starts = offsets_of(lengths[wanted])
        joined = Columns(
            {name: np.empty(starts[-1], c.dtype) for name, c in first.response.items()},
            {name: np.empty(len(wanted), c.dtype) for name, c in first.row.items()},
        )
        for info, result in collected.values():
            rows, real = parts[info.dp_rank]
            for name, column in result.row.items():
                joined.row[name][places[rows[real]]] = column[real]
            for theirs, ours in self._entries(info, rows, real, starts[places[rows]]):
                for name, column in result.response.items():
                    joined.response[name][ours] = column[theirs]
        return joined

    def _entries(
        self, info: RankInfo, rows: np.ndarray, real: np.ndarray, starts: np.ndarray
    ) -> Iterator[tuple[slice, slice]]:
        """Yield the parts of a rank's response column, and their places in the joined one.

        ``starts``: of each row in the joined column.
        """
        batch = self._shared.batch
        split, lengths = info.split(batch.width), batch.lengths[rows]
        whole = np.array([[[0, batch.width]]])
        spans = whole if split is None else split.predicted(lengths)
        bounds = entries_in(spans, batch.response_lengths[rows], batch.prompt_lengths[rows])
        taken = 0
        for start, kept, parts in zip(starts.tolist(), real.tolist(), bounds.tolist(), strict=True):
            for first, end in parts:
                if kept:
                    yield slice(taken, taken + end - first), slice(start + first, start + end)
                taken += end - first

    def _rows(self, part: int) -> tuple[np.ndarray, np.ndarray]:
        partition = self._shared.partition
        pieces = [partition.pieces[step][part] for step in self._steps]
        return np.concatenate(pieces), np.concatenate([partition.real[step][part] for step in self._steps])
