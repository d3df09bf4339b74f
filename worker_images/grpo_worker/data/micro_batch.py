"""Rows of a batch -> what one forward pass sees, and its tokens back to rows (torch only)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from grpo_worker.data.balance import balanced

Batch = dict[str, torch.Tensor]
PAD = 0  # nothing is computed from it: any token of the vocabulary would do


@dataclass(frozen=True, slots=True)
class Shape:
    """How rows become micro-batches.

    ``rows``: rows of one micro-batch (padded), or None to pack tokens without padding.
    ``multiple``: tokens of a micro-batch are a multiple of this (tensor and context parallelism).
    """

    rows: int | None
    multiple: int = 1


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """input_ids, labels, position_ids: [b, s]; packed: one row, sequences one after the other.

    ``bounds``: packed only, where each sequence starts, and the end of the last.
    ``indices``: rows of the batch that it holds; ``columns``: those rows' other columns.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    indices: list[int]
    lengths: list[int]
    columns: Batch
    bounds: list[int] = field(default_factory=list)

    def to_rows(self, tokens: torch.Tensor, width: int) -> torch.Tensor:
        """What the model says of each next token, [b, s], as [rows, width]: entry t belongs to
        token t, 0 at column 0 and in the padding. Differentiable."""
        if not self.bounds:
            ahead = tokens[: len(self.indices), : width - 1]
            return torch.nn.functional.pad(ahead, (1, width - 1 - ahead.shape[1]))
        rows = [
            torch.nn.functional.pad(tokens[0, start : start + length - 1], (1, width - length))
            for start, length in zip(self.bounds, self.lengths, strict=False)
        ]
        return torch.stack(rows) if rows else tokens.new_zeros((0, width))

    def spread(self, rows: torch.Tensor, whole: torch.Tensor) -> None:
        """Put rows [rows, width, ...] of input tokens into ``whole`` [b, s, ...], all but each row's
        last token: nothing was computed from that."""
        for place, length in enumerate(self.lengths):
            start = self.bounds[place] if self.bounds else 0
            whole[0 if self.bounds else place, start : start + length - 1] = rows[place, : length - 1]


def lengths_of(batch: Batch) -> list[int]:
    """Tokens of each row, prompt and response."""
    return [int(n) for n in batch["attention_mask"].sum(1)]


def split(batch: Batch, shape: Shape, groups: Sequence[Sequence[int]] | None = None) -> Iterator[MicroBatch]:
    """Micro-batches of a rank's rows, all of one shape: pipeline stages agree on it beforehand.
    ``groups``: the rows of each, packed; empty ones are allowed (data-parallel ranks run equally
    many)."""
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
    """Rows in ``count`` packed micro-batches; more than there are rows leaves some empty."""
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
