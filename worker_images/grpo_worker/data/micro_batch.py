"""Conversion of a batch's rows to micro-batches, and of model outputs back to rows (torch only)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

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
    ``indices``: rows of the batch in this micro-batch; ``columns``: the other columns of these rows.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    indices: list[int]
    lengths: list[int]
    columns: Batch
    bounds: list[int] = field(default_factory=list)

    def to_rows(self, tokens: torch.Tensor, width: int) -> torch.Tensor:
        """Convert outputs about each next token, [b, s], to [rows, width].

        In the result entry t belongs to token t; column 0 and the padding are 0. Differentiable.
        """
        if not self.bounds:
            ahead = tokens[: len(self.indices), : width - 1]
            return torch.nn.functional.pad(ahead, (1, width - 1 - ahead.shape[1]))
        rows = [
            torch.nn.functional.pad(tokens[0, start : start + length - 1], (1, width - length))
            for start, length in zip(self.bounds, self.lengths, strict=False)
        ]
        return torch.stack(rows) if rows else tokens.new_zeros((0, width))

    def spread(self, rows: torch.Tensor, whole: torch.Tensor) -> None:
        """Copy rows [rows, width, ...] about input tokens into ``whole`` [b, s, ...].

        The last token of each row is left out, because no engine computed anything from it.
        """
        for number, length in enumerate(self.lengths):
            start = self.bounds[number] if self.bounds else 0
            whole[0 if self.bounds else number, start : start + length - 1] = rows[number, : length - 1]


def lengths_of(batch: Batch) -> list[int]:
    """Return the number of tokens of each row, prompt and response."""
    return [int(n) for n in batch["attention_mask"].sum(1)]


def split(batch: Batch, shape: Shape, groups: Sequence[Sequence[int]] | None = None) -> Iterator[MicroBatch]:
    """Split a rank's rows into micro-batches of one shape, on which pipeline stages rely.

    ``groups``: the rows of each packed micro-batch. Groups may be empty, because all data-parallel ranks run
    the same number of micro-batches.
    """
    if groups is not None:
        lengths = lengths_of(batch)
        fullest = max(1, *(sum(lengths[i] for i in group) for group in groups))
        width = math.ceil(fullest / shape.multiple) * shape.multiple
        for group in groups:
            yield _packed(batch, list(group), lengths, width)
        return
    rows = batch["input_ids"].shape[0]
    assert shape.rows is not None, "padded micro-batches need a number of rows"
    for start in range(0, rows, shape.rows):
        yield _padded(batch, list(range(start, min(start + shape.rows, rows))), shape)


def groups_for(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Split rows into ``count`` groups for packing; some are empty if there are fewer rows."""
    filled = balanced(lengths, min(count, max(1, len(lengths))))
    return filled + [[] for _ in range(count - len(filled))]


def _padded(batch: Batch, indices: list[int], shape: Shape) -> MicroBatch:
    columns = {name: column[indices] for name, column in batch.items()}
    ids = columns.pop("input_ids")
    width = math.ceil(ids.shape[1] / shape.multiple) * shape.multiple
    missing = 0 if shape.rows is None else shape.rows - ids.shape[0]
    ids = torch.nn.functional.pad(ids, (0, width - ids.shape[1], 0, missing), value=PAD)
    positions = torch.arange(width, device=ids.device).expand_as(ids).contiguous()
    lengths = [int(n) for n in columns["attention_mask"].sum(1)]
    return MicroBatch(ids, torch.roll(ids, -1, 1), positions, indices, lengths, columns)


def _packed(batch: Batch, indices: list[int], all_lengths: Sequence[int], width: int) -> MicroBatch:
    lengths = [all_lengths[i] for i in indices]
    padding = width - sum(lengths)
    ids = batch["input_ids"]
    parts = [ids[i, :n] for i, n in zip(indices, lengths, strict=True)]
    spans = [*lengths, padding] if padding else lengths
    if padding:
        parts.append(ids.new_full((padding,), PAD))
    row = torch.cat(parts)[None]
    positions = torch.cat([torch.arange(n, device=ids.device) for n in spans])[None]
    bounds = [0]
    for span in spans:
        bounds.append(bounds[-1] + span)
    columns = {name: column[indices] for name, column in batch.items() if name != "input_ids"}
    return MicroBatch(row, torch.roll(row, -1, 1), positions, indices, lengths, columns, bounds)
