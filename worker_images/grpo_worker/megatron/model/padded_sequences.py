"""Packed sequences as padded batches of similar lengths, and back."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class PaddedSequences:
    """Places of the tokens of packed sequences in padded batches.

    A batch has the sequences whose lengths lie between the same powers of two, so that less than half of it
    is padding, and the number of batches grows with the logarithm of the longest length only.
    """

    def __init__(self, bounds: Sequence[int], device: torch.device | str | None = None) -> None:
        """``bounds``: of the sequences among t tokens, ascending, from 0 to t."""
        groups: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for start, end in pairwise(bounds):
            if end > start:
                groups[(end - start - 1).bit_length()].append((start, end))
        batches = [_places(groups[size]) for size in sorted(groups)]
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


def _places(spans: Sequence[tuple[int, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [s, b] of a batch of sequences, and which of them are no padding.

    Padding repeats the first token of its sequence.
    """
    starts = torch.tensor([start for start, _ in spans])
    lengths = torch.tensor([end - start for start, end in spans])
    steps = torch.arange(int(lengths.max()))[:, None]
    real = steps < lengths
    return starts + steps * real, real
