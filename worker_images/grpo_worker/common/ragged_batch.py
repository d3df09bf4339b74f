"""Batch of rows of different lengths in flat columns, without padding (numpy only)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

INPUT_IDS = "input_ids"
ROUTED_EXPERTS = "routed_experts"  # row column of references, see data/routed_experts.py


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return the start of each row in a flat column, and the end of the last one: int64 [rows + 1]."""
    starts = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts


def take_rows(flat: np.ndarray, lengths: np.ndarray, rows: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the entries of ``rows`` in this order. flat: a column of rows of these ``lengths``."""
    starts = offsets_of(lengths)
    return np.concatenate([flat[starts[row] : starts[row + 1]] for row in rows] or [flat[:0]])


def entries_in(spans: np.ndarray, lengths: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Return the first entry and the end of each row's part in each span: int64 [rows, spans, 2].

    ``spans``: tokens (first, end) of each row, [rows, spans, 2]. A column has ``lengths`` entries of each
    row, for the tokens after the first ``before`` ones.
    """
    edges = spans - before[:, None, None]
    bounds: np.ndarray = np.clip(edges, 0, lengths[:, None, None])
    return bounds


def take_spans(
    flat: np.ndarray,
    lengths: np.ndarray,
    before: np.ndarray,
    rows: Sequence[int] | np.ndarray,
    spans: np.ndarray,
) -> np.ndarray:
    """Return the entries of ``rows`` for the tokens in ``spans``, in this order.

    ``flat``: a column with ``lengths`` entries of each row; it and ``spans`` are of all rows, see entries_in.
    """
    starts, bounds = offsets_of(lengths), entries_in(spans, lengths, before)
    parts = [flat[starts[row] + first : starts[row] + end] for row in rows for first, end in bounds[row]]
    return np.concatenate(parts or [flat[:0]])


def spread_spans(taken: np.ndarray, lengths: np.ndarray, before: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Return a whole column from what take_spans returned for all rows; other entries are 0."""
    starts, place = offsets_of(lengths), 0
    flat = np.zeros(starts[-1], taken.dtype)
    for start, parts in zip(starts, entries_in(spans, lengths, before).tolist(), strict=False):
        for first, end in parts:
            flat[start + first : start + end] = taken[place : place + end - first]
            place += end - first
    return flat


@dataclass(frozen=True)
class RaggedBatch:
    """Rows of prompt and response tokens.

    ``prompt_lengths``, ``lengths``: int32 [rows], tokens of the prompt, and of prompt and response.
    ``width``: length of the longest row of the step's whole batch, to which padded micro-batches extend.
    ``input_ids``: int32 [tokens], all rows in succession; None on ranks that do not read it.
    ``response``: columns with an entry for each response token, [response tokens].
    ``row``: columns with an entry for each row, [rows].
    ``routed``: only on a rank: the experts of each row, [expert layers of the rank, tokens - 1, k] each.

    On a context-parallel rank, ids and entries of response columns that it does not read are 0. The masks of
    padded batches follow from the lengths and are not stored.
    """

    prompt_lengths: np.ndarray
    lengths: np.ndarray
    width: int
    input_ids: np.ndarray | None = None
    response: dict[str, np.ndarray] = field(default_factory=dict)
    row: dict[str, np.ndarray] = field(default_factory=dict)
    routed: list[np.ndarray] | None = None

    def __post_init__(self) -> None:
        """Check the sizes. Raises ValueError that names the column."""
        sizes = {name: (column, int(self.response_lengths.sum())) for name, column in self.response.items()}
        sizes |= {name: (column, self.rows) for name, column in self.row.items()}
        if self.input_ids is not None:
            sizes[INPUT_IDS] = self.input_ids, self.tokens
        for name, (column, expected) in sizes.items():
            if len(column) != expected:
                raise ValueError(f"column {name} has {len(column)} entries, its rows have {expected}")

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @cached_property
    def tokens(self) -> int:
        """Number of prompt and response tokens."""
        return int(self.lengths.sum())

    @cached_property
    def response_lengths(self) -> np.ndarray:
        """Number of response tokens of each row, int32 [rows]."""
        after: np.ndarray = self.lengths - self.prompt_lengths
        return after

    @cached_property
    def starts(self) -> np.ndarray:
        """Start of each row in ``input_ids``, int64 [rows + 1]."""
        return offsets_of(self.lengths)

    @cached_property
    def response_starts(self) -> np.ndarray:
        """Start of each row in a response column, int64 [rows + 1]."""
        return offsets_of(self.response_lengths)

    @property
    def nbytes(self) -> int:
        """Size of all columns."""
        own = [self.prompt_lengths, self.lengths, *self.response.values(), *self.row.values()]
        return sum(column.nbytes for column in own) + (0 if self.input_ids is None else self.input_ids.nbytes)

    def column(self, name: str) -> np.ndarray | None:
        """Return a column by name, or None."""
        if name == INPUT_IDS:
            return self.input_ids
        found = self.response.get(name)
        return self.row.get(name) if found is None else found

    def take_column(
        self, name: str, rows: Sequence[int] | np.ndarray, spans: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the entries of ``rows`` of one column, in this order.

        ``spans``: the tokens of each row of the batch whose entries are taken, see entries_in; None: all.
        """
        if name in self.row:
            return self.row[name][np.asarray(rows, dtype=np.int64)]
        column = self.column(name)
        assert column is not None, f"there is no column {name}"
        ids = name == INPUT_IDS
        lengths = self.lengths if ids else self.response_lengths
        if spans is None:
            return take_rows(column, lengths, rows)
        before = np.zeros_like(lengths) if ids else self.prompt_lengths
        return take_spans(column, lengths, before, rows, spans)

    def with_columns(self, **columns: np.ndarray) -> "RaggedBatch":
        """Return the batch with more columns of response tokens."""
        return replace(self, response=self.response | columns)

    def with_rows(self, **columns: np.ndarray) -> "RaggedBatch":
        """Return the batch with more columns of rows."""
        return replace(self, row=self.row | columns)

    def response_of(self, tokens: np.ndarray) -> np.ndarray:
        """Return the response's entries of a column with an entry for each token."""
        starts = self.starts
        parts = [tokens[starts[i] + self.prompt_lengths[i] : starts[i + 1]] for i in range(self.rows)]
        return np.concatenate(parts or [tokens[:0]])

    def row_sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of each row's entries of a response column, float64 [rows]."""
        total = np.zeros(self.rows)
        filled = np.flatnonzero(self.response_lengths)
        if len(filled):
            total[filled] = np.add.reduceat(values, self.response_starts[:-1][filled], dtype=np.float64)
        return total

    def per_token(self, values: np.ndarray) -> np.ndarray:
        """Return each row's value at each of its response tokens. values: [rows]."""
        return np.repeat(values, self.response_lengths)


def joined(batches: Sequence[RaggedBatch]) -> RaggedBatch:
    """Return the rows of several batches with the same columns in succession; one batch is not copied."""
    first = batches[0]
    if len(batches) == 1:
        return first

    def all_of(get: Any) -> np.ndarray:
        return np.concatenate([get(batch) for batch in batches])

    return RaggedBatch(
        all_of(lambda b: b.prompt_lengths),
        all_of(lambda b: b.lengths),
        first.width,
        None if first.input_ids is None else all_of(lambda b: b.input_ids),
        {name: all_of(lambda b, name=name: b.response[name]) for name in first.response},
        {name: all_of(lambda b, name=name: b.row[name]) for name in first.row},
    )
