"""Conversion of a batch's rows to micro-batches, and of model outputs back to rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import numpy as np
import torch

from grpo_worker.common.context_spans import ContextSplit, padded_size
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.data.balance import balanced

Batch = dict[str, torch.Tensor]
PAD = 0  # any token of the vocabulary: outputs at padding are not used


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of micro-batches.

    ``rows``: number of padded rows, or None to pack sequences without padding.
    ``multiple``: the number of tokens is a multiple of this (tensor and context parallelism).
    """

    rows: int | None
    multiple: int = 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Input of one forward pass.

    ``input_ids``, ``labels``, ``position_ids``: [b, s]; if packed, one row with all sequences in succession.
    ``bounds``: packed only, the start of each sequence and the end of the last one.
    ``indices``: rows of the batch in this micro-batch; ``columns``: the other columns of these rows, padded,
    [rows, tokens], in the form of ``loss_rows``.
    ``routed``: experts of these rows, if the batch has them; see RaggedBatch.
    ``own``: with context parallelism the tokens of each row, or of the packed one, that this rank computes,
    int64 [s / cp]; None: all.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    indices: list[int]
    lengths: list[int]
    columns: Batch
    bounds: list[int] = field(default_factory=list)
    routed: list[np.ndarray] | None = None
    own: torch.Tensor | None = None
    _next_weights: Callable[[], torch.Tensor] | None = field(default=None, compare=False)

    def to_rows(self, tokens: torch.Tensor, width: int) -> torch.Tensor:
        """Convert outputs about each next token, [b, s / cp], to [rows, width].

        In the result entry t belongs to token t; column 0, the padding and other ranks' tokens are 0.
        """
        return self._shifted(tokens, width, 1)

    def own_rows(self, tokens: torch.Tensor, width: int) -> torch.Tensor:
        """Convert outputs at each token, [b, s / cp], to [rows, width]."""
        return self._shifted(tokens, width, 0)

    def loss_rows(self, tokens: torch.Tensor, width: int) -> torch.Tensor:
        """Convert outputs about each next token, [b, s / cp], to the form of ``columns``. Differentiable.

        This is the form of ``to_rows``, but padded rows have the tokens of a context-parallel rank only.
        """
        cut = self.own is not None and not self.bounds
        return tokens[: len(self.indices)] if cut else self.to_rows(tokens, width)

    def whole(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return outputs at all tokens, [b, s, ...], 0 at other ranks', from [b, s / cp, ...]."""
        if self.own is None:
            return tokens
        size = tokens.shape[0], self.input_ids.shape[1], *tokens.shape[2:]
        return tokens.new_zeros(size).index_copy(1, self.own, tokens)

    def next_weights(self) -> torch.Tensor:
        """Return the weight of the token after that of each entry of ``columns``."""
        assert self._next_weights is not None, "the batch has no weights"
        return self._next_weights()

    def _shifted(self, tokens: torch.Tensor, width: int, shift: int) -> torch.Tensor:
        """Return the outputs of each row, moved right by ``shift`` columns, without its last ``shift``."""
        tokens = self.whole(tokens)
        if not self.bounds:
            inside = tokens[: len(self.indices), : width - shift]
            return torch.nn.functional.pad(inside, (shift, width - shift - inside.shape[1]))
        rows = [
            torch.nn.functional.pad(tokens[0, start : start + length - shift], (shift, width - length))
            for start, length in zip(self.bounds, self.lengths, strict=False)
        ]
        # Without rows the result still depends on the outputs: a pipeline stage waits for their gradient.
        return torch.stack(rows) if rows else tokens[0, :0, None].expand(0, width)

    def padding(self, ahead: int = 0) -> torch.Tensor:
        """Return which tokens of ``input_ids`` belong to no row, bool [b, s].

        ``ahead``: also mark the last tokens of each row, those without a token that far ahead of them.
        """
        mask = torch.ones(self.input_ids.shape, dtype=torch.bool)
        for number in range(len(self.indices)):
            row, tokens = self.place(number)
            mask[row, tokens.start : max(tokens.start, tokens.stop - ahead)] = False
        return mask.to(self.input_ids.device)

    def place(self, number: int) -> tuple[int, slice]:
        """Return where ``input_ids`` holds the tokens of the micro-batch's row ``number``."""
        start = self.bounds[number] if self.bounds else 0
        return 0 if self.bounds else number, slice(start, start + self.lengths[number])


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """A rank's rows as micro-batches of one shape, on which pipeline stages rely.

    Each one is built, and moved to the ``device``, when the schedule asks for it.
    ``groups``: rows of each micro-batch. Groups may be empty if packed, because all data-parallel ranks run
    the same number of micro-batches. ``size``: shape [b, s] of each one. ``split``: of context parallelism.
    """

    batch: RaggedBatch
    groups: list[list[int]]
    size: tuple[int, int]
    packed: bool
    device: torch.device
    split: ContextSplit | None = None

    def __len__(self) -> int:
        """Return the number of micro-batches."""
        return len(self.groups)

    def __iter__(self) -> Iterator[MicroBatch]:
        """Build the micro-batches in order."""
        build = self._packed if self.packed else self._padded
        return (build(group) for group in self.groups)

    def _padded(self, indices: list[int]) -> MicroBatch:
        columns = self._columns(indices)
        ids = columns.pop("input_ids")
        rows, width = self.size
        ids = torch.nn.functional.pad(ids, (0, width - ids.shape[1], 0, rows - ids.shape[0]), value=PAD)
        positions = torch.arange(width, device=ids.device).expand_as(ids).contiguous()
        lengths = [int(self.batch.lengths[i]) for i in indices]
        labels, routed = torch.roll(ids, -1, 1), self._routed(indices)
        return MicroBatch(
            ids, labels, positions, indices, lengths, columns, [], routed, self._own([width]),
            partial(self._next_weights, indices),
        )  # fmt: skip

    def _packed(self, indices: list[int]) -> MicroBatch:
        lengths = [int(self.batch.lengths[i]) for i in indices]
        sizes = padded_sizes(lengths, self.split)
        if padding := self.size[1] - sum(sizes):
            sizes.append(padding)
        columns = self._columns(indices)
        ids = columns.pop("input_ids")
        row, bounds = ids.new_full((1, self.size[1]), PAD), [0, *accumulate(sizes)]
        for number, (start, length) in enumerate(zip(bounds, lengths, strict=False)):
            row[0, start : start + length] = ids[number, :length]
        positions = torch.cat([torch.arange(n, device=ids.device) for n in sizes])[None]
        labels, routed = torch.roll(row, -1, 1), self._routed(indices)
        return MicroBatch(
            row, labels, positions, indices, lengths, columns, bounds, routed, self._own(sizes),
            partial(self._next_weights, indices),
        )  # fmt: skip

    def _own(self, sizes: list[int]) -> torch.Tensor | None:
        """Return this rank's tokens of sequences of these sizes, one after the other."""
        if self.split is None:
            return None
        starts = np.cumsum([0, *sizes[:-1]])[:, None, None]
        spans = (self.split.spans(sizes) + starts).reshape(-1, 2).tolist()
        return torch.cat([torch.arange(*span) for span in spans]).to(self.device)

    @property
    def _tokens(self) -> np.ndarray:
        """Return the token of each entry of a column: for padded rows those that the outputs predict."""
        if self.split is None or self.packed:
            return np.arange(self.batch.width)
        return np.concatenate([np.arange(a + 1, b + 1) for a, b in self.split.spans([0])[0].tolist()])

    def _columns(self, indices: list[int]) -> Batch:
        columns = padded(self.batch, indices, self._tokens, self._predicted(indices))
        return {name: column.to(self.device) for name, column in columns.items()}

    def _next_weights(self, indices: list[int]) -> torch.Tensor:
        weights = _spread_row(self.batch, indices, "weights", self._tokens + 1)
        predicted = self._predicted(indices)
        return (weights if predicted is None else weights * torch.from_numpy(predicted)).to(self.device)

    def _predicted(self, indices: list[int]) -> np.ndarray | None:
        """Return which tokens of packed rows this rank's outputs predict, bool [rows, width]; None: all."""
        if self.split is None or not self.packed:
            return None
        spans = self.split.predicted(self.batch.lengths[indices])
        places = np.arange(self.batch.width)[None, :, None]
        inside = (spans[:, None, :, 0] <= places) & (places < spans[:, None, :, 1])
        return np.asarray(inside.any(axis=2))

    def _routed(self, indices: list[int]) -> list[np.ndarray] | None:
        return None if self.batch.routed is None else [self.batch.routed[i] for i in indices]


def split(
    batch: RaggedBatch,
    shape: Shape,
    device: torch.device,
    groups: Sequence[Sequence[int]] | None = None,
    context: ContextSplit | None = None,
) -> MicroBatches:
    """Return a rank's rows as micro-batches.

    ``groups``: the rows of each packed micro-batch. ``context``: of context parallelism.
    """
    if groups is not None:
        fullest = max(1, *(sum(padded_sizes(batch.lengths[list(group)], context)) for group in groups))
        size = 1, padded_size(fullest, shape.multiple)
        return MicroBatches(batch, [list(group) for group in groups], size, True, device, context)
    assert shape.rows is not None, "padded micro-batches need a number of rows"
    starts = range(0, batch.rows, shape.rows)
    rows = [list(range(start, min(start + shape.rows, batch.rows))) for start in starts]
    size = shape.rows, padded_size(batch.width, shape.multiple)
    return MicroBatches(batch, rows, size, False, device, context)


def padded_sizes(lengths: Sequence[int] | np.ndarray, context: ContextSplit | None) -> list[int]:
    """Return the tokens that packed sequences take: context parallelism cuts each into equal chunks."""
    multiple = 1 if context is None else context.multiple
    return [padded_size(int(length), multiple) for length in lengths]


def groups_for(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Split rows into ``count`` groups for packing; some are empty if there are fewer rows."""
    filled = balanced(lengths, min(count, max(1, len(lengths))))
    return filled + [[] for _ in range(count - len(filled))]


def padded(
    batch: RaggedBatch,
    rows: Sequence[int],
    tokens: np.ndarray | None = None,
    kept: np.ndarray | None = None,
) -> Batch:
    """Return some rows, right-padded to the batch's width, 0 in the padding.

    input_ids (int64 [rows, width]), response_mask (float32), every response column, and every numeric row
    column at the response tokens. ``tokens``: those of which columns have entries; default: all of the width.
    ``kept``: bool [rows, tokens], entries that are not 0 in any column but input_ids; default: all.
    """
    chosen = np.asarray(rows, dtype=np.int64)
    places = np.arange(batch.width) if tokens is None else tokens
    ids = np.zeros((len(rows), batch.width), dtype=np.int64)
    if batch.input_ids is not None:
        ids[np.arange(batch.width) < batch.lengths[chosen, None]] = batch.take_column("input_ids", rows)
    inside = _inside(batch, chosen, places)
    # Entry of each place in a response column; outside the response it means nothing.
    entries = (batch.response_starts[chosen] - batch.prompt_lengths[chosen])[:, None] + places
    columns = {"input_ids": torch.from_numpy(ids), "response_mask": torch.from_numpy(inside).float()}
    for name, column in batch.response.items():
        values = np.zeros(inside.shape, dtype=column.dtype)
        values[inside] = column[entries[inside]]
        columns[name] = torch.from_numpy(values)
    for name, column in batch.row.items():
        if column.dtype.kind in "fiu":
            columns[name] = _spread_row(batch, rows, name, places)
    if kept is None:
        return columns
    mask = torch.from_numpy(kept)
    return {name: c if name == "input_ids" else c * mask for name, c in columns.items()}


def _inside(batch: RaggedBatch, chosen: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return where ``places`` of rows are response tokens, bool [rows, places]."""
    inside: np.ndarray = (places >= batch.prompt_lengths[chosen, None]) & (
        places < batch.lengths[chosen, None]
    )
    return inside


def _spread_row(batch: RaggedBatch, rows: Sequence[int], name: str, places: np.ndarray) -> torch.Tensor:
    """Return a row column's values at those ``places`` of rows that are response tokens, 0 at others."""
    chosen = np.asarray(rows, dtype=np.int64)
    values = batch.row[name][chosen, None]
    inside = _inside(batch, chosen, places)
    return torch.from_numpy(np.where(inside, values, np.zeros((), values.dtype)))
