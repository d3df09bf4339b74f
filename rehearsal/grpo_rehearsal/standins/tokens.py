"""Tokens of stand-in engines: which ones a seed draws, how many, and how SGLang writes them.

Token ``i`` of a response depends on the sampling seed and ``i`` alone, as with SGLang's deterministic
sampling, so a response that continues on another engine becomes the same one. The log-probability of a token
is a function of its id, which stand-in ranks know too: rows that are mixed up fail the parity check.
"""

import hashlib
from collections.abc import Callable, Sequence

import numpy as np

TABLE = 4093  # a prime, so that seeds begin everywhere


class TokenTable:
    """Ids and log-probabilities of drawn tokens, with their JSON prepared."""

    def __init__(self, vocabulary: int, end: int) -> None:
        """``vocabulary``: number of ids. ``end``: id of the token that ends a response, drawn only there."""
        ids = [(i * max(vocabulary // TABLE, 1)) % vocabulary for i in range(TABLE)]
        self.end = end
        self.ids = [i if i != end else (i + 1) % vocabulary for i in ids]
        self._texts = [str(i) for i in self.ids]
        self._pairs = [_pair(i) for i in self.ids]

    def encode(self, seed: int, first: int, last: int, *, ended: bool) -> tuple[str, str]:
        """Return output_ids and output_token_logprobs of tokens [first, last) as JSON.

        ``ended``: the last of them is the token that ends the response.
        """
        start, count = (seed + first) % TABLE, last - first - ended
        texts = _cyclic(self._texts, start, count)
        pairs = _cyclic(self._pairs, start, count)
        if ended:
            texts.append(str(self.end))
            pairs.append(_pair(self.end))
        return f"[{','.join(texts)}]", f"[{','.join(pairs)}]"


def _cyclic(values: list[str], start: int, count: int) -> list[str]:
    """Return ``count`` values from ``start`` on, which begin again at the end."""
    rounds = (start + count) // len(values) + 1
    return (values if rounds == 1 else values * rounds)[start : start + count]


def _pair(token: int) -> str:
    return f"[{log_prob(token):.6f},{token},null]"


def log_prob(token: int) -> float:
    """Return the log-probability that all stand-ins give to a token."""
    return -((token * 7919) % 1009) / 1009


def log_probs(ids: np.ndarray) -> np.ndarray:
    """Return the log-probability of each id as fp32; see log_prob."""
    return (-((ids.astype(np.int64) * 7919) % 1009) / 1009).astype(np.float32)


def drawn_lengths(lengths: Sequence[float]) -> Callable[[int], int]:
    """Return a function from a sampling seed to a response length, drawn from ``lengths``.

    ``lengths``: at equal steps of probability.
    """

    def length(seed: int) -> int:
        digest = hashlib.blake2b(seed.to_bytes(8, "little"), digest_size=8).digest()
        return max(round(lengths[int.from_bytes(digest, "little") % len(lengths)]), 1)

    return length
