"""Packed sequences as padded batches of similar lengths, and back."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
SHORTEST = 6  # binary logarithm of the length of the shortest batches: cuDNN refuses sequences of one token


class PaddedSequences:
    """Places of the tokens of packed sequences in padded batches.

    Lengths and numbers of sequences of all batches are powers of two: cuDNN plans a kernel for each shape
    that it meets, and of these there are few. Less than half of a batch of more than 64 tokens a sequence is
    padding, and the number of batches grows only with the logarithms of the longest length and of the number
    of sequences.
    """

    def __init__(self, bounds: Sequence[int], device: torch.device | str | None = None) -> None:
        """``bounds``: of the sequences among t tokens, ascending, from 0 to t."""
        groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for start, end in pairwise(bounds):
            if end > start:
                groups[max((end - start - 1).bit_length(), SHORTEST)].append((start, end))
        batches = [
            _places(spans, 1 << size) for size in sorted(groups) for spans in _powers_of_two(groups[size])
        ]
        order = torch.empty(bounds[-1], dtype=torch.int64)
        first = 0
        for places, real in batches:
            order[places[real]] = first + real.flatten().nonzero()[:, 0]
            first += places.numel()
        self._batches = [places.to(device) for places, _ in batches]
        self._order = order.to(device)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Return causal attention [t, ...] over tokens [t, heads, d].

        ``attend`` takes and returns [s, b, ...] and must be causal: then no token sees padding, which
        follows its sequence, and padding, of which nothing is used, gets no gradient.
        """
        padded = [attend(query[at], key[at], value[at]).flatten(0, 1) for at in self._batches]
        return torch.cat(padded)[self._order]


def _powers_of_two(spans: Sequence[tuple[int, int]]) -> Iterator[Sequence[tuple[int, int]]]:
    """Yield ``spans`` in parts, of which each has a power of two of them."""
    first = 0
    for bit in reversed(range(len(spans).bit_length())):
        if len(spans) & 1 << bit:
            yield spans[first : first + (1 << bit)]
            first += 1 << bit


def _places(spans: Sequence[tuple[int, int]], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [length, b] of a batch of sequences, and which of them are no padding.

    Padding repeats the first token of its sequence.
    """
    starts = torch.tensor([start for start, _ in spans])
    lengths = torch.tensor([end - start for start, end in spans])
    steps = torch.arange(length)[:, None]
    real = steps < lengths
    return starts + steps * real, real
