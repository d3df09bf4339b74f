"""Split of padded rows over context-parallel ranks (pure Python)."""

from collections.abc import Sequence

Span = tuple[int, int]  # (first token, end)


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


def context_spans(width: int, tensor: int, context: int, rank: int) -> list[Span]:
    """Return the tokens of each row that a context-parallel rank computes. ``width``: of the batch."""
    if context == 1:
        return [(0, width)]
    multiple = token_multiple(tensor, context)
    chunk = -(-width // multiple) * multiple // (2 * context)
    return [(c * chunk, (c + 1) * chunk) for c in zigzag_chunks(context)[2 * rank : 2 * rank + 2]]


def next_tokens(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Return the tokens that outputs at ``spans`` predict.

    The first token of a row, which no output predicts, goes to the rank of the first chunk, so that the spans
    of all ranks together are whole rows.
    """
    return tuple((first + 1 if first else 0, end + 1) for first, end in spans)
