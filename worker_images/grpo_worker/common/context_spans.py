"""Split of rows over context-parallel ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Span = tuple[int, int]  # (first token, end)
FOLLOWING = 2  # tokens after a rank's own that it reads: the labels of its last token and of the MTP layer's


def zigzag_chunks(size: int) -> list[int]:
    """Return the chunks of a sequence in the order of the context-parallel ranks.

    Rank r holds chunks r and 2 x cp - 1 - r, so that causal attention costs every rank the same.
    """
    return [chunk for rank in range(size) for chunk in (rank, 2 * size - 1 - rank)]


def token_multiple(tensor: int, context: int) -> int:
    """Return what the number of tokens of a forward pass is a multiple of.

    Context parallelism splits a sequence into 2 x cp chunks, sequence parallelism splits it by tp.
    """
    return tensor * (2 * context if context > 1 else 1)


def padded_size(length: int, multiple: int) -> int:
    """Return the next multiple of ``multiple``."""
    return -(-length // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ContextSplit:
    """Rows as one context-parallel rank sees them. ``tensor``, ``context``: parallel sizes.

    ``width``: of padded rows, which are all cut at the same tokens. None: rows are packed, and each is cut by
    its own length.
    """

    tensor: int
    context: int
    rank: int
    width: int | None

    @property
    def multiple(self) -> int:
        """What the number of tokens of each row, with its padding, is a multiple of."""
        return token_multiple(self.tensor, self.context)

    def spans(self, lengths: np.ndarray | Sequence[int]) -> np.ndarray:
        """Return the tokens (first, end) of rows of these lengths that the rank computes: [rows, 2, 2]."""
        sizes = np.array(lengths, np.int64)
        if self.width is not None:
            sizes[:] = self.width
        chunk = (-(-sizes // self.multiple) * self.multiple // (2 * self.context))[:, None]
        numbers = zigzag_chunks(self.context)[2 * self.rank : 2 * self.rank + 2]
        first = chunk * np.array(numbers)
        return np.stack([first, first + chunk], axis=-1)

    def read(self, lengths: np.ndarray | Sequence[int]) -> np.ndarray:
        """Return the tokens whose ids the rank reads: [rows, 2, 2]."""
        spans = self.spans(lengths)
        spans[..., 1] += FOLLOWING
        return spans

    def predicted(self, lengths: np.ndarray | Sequence[int]) -> np.ndarray:
        """Return the tokens that the rank's outputs predict: [rows, 2, 2].

        The first token of a row, which no output predicts, goes to the rank of the first chunk, so that the
        spans of all ranks together are whole rows.
        """
        spans = self.spans(lengths) + 1
        spans[..., 0] -= spans[..., 0] == 1
        return spans
