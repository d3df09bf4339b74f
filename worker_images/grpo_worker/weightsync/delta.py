"""What changed between two versions of a rank's blob: 16-bit words, by their place.

After one step of training about one bf16 weight in a hundred has another bit pattern. A delta names those
words; it is of use where the network is slower than the memory of both ends.
"""

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

_CHUNK = 1 << 16  # words of which a 16-bit number can name one
_HEAD = struct.Struct("<4sI")
_MAGIC = b"GRD1"

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]


class DeltaError(ValueError):
    """A delta that does not belong here; the whole blob is wanted instead."""


@dataclass(frozen=True, slots=True)
class Head:
    """``base``, ``digest``: of the blob before and after; ``nbytes``: its size; ``words``: that changed."""

    base: str
    digest: str
    nbytes: int
    words: int


def encode(old: Bytes, new: Bytes, base: str, digest: str, most: float = 0.5) -> bytes | None:
    """The delta from ``old`` to ``new`` (uint8 [bytes], same size) of digests ``base`` and ``digest``.

    None when it would take more than ``most`` of the blob. Raises DeltaError for blobs of other sizes.
    """
    if len(old) != len(new):
        raise DeltaError(f"blobs of {len(old)} and {len(new)} bytes have no delta")
    ours, theirs = _padded(old), _padded(new)
    counts = np.zeros(-(-len(theirs) // _CHUNK), dtype=np.uint32)
    _count(ours, theirs, counts)
    words = int(counts.sum())
    if words * 4 > most * len(new):
        return None
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    places, values = np.empty(words, dtype=np.uint16), np.empty(words, dtype=np.uint16)
    _fill(ours, theirs, starts, places, values)
    head = json.dumps(asdict(Head(base, digest, len(new), words))).encode()
    head += b" " * (-(_HEAD.size + len(head)) % 8)  # so that the numbers after it are aligned
    parts: tuple[Any, ...] = (head, counts.data, places.data, values.data)
    return b"".join([_HEAD.pack(_MAGIC, len(head)), *parts])


def apply(blob: Bytes, delta: bytes | bytearray, base: str) -> Head:
    """Turn ``blob`` (uint8 [bytes], of digest ``base``) into what the delta leads to, in place.

    The caller compares the digest. Raises DeltaError for a delta of something else, before it writes.
    """
    head, counts, places, values = _read(memoryview(delta))
    if head.base != base or head.nbytes != len(blob):
        raise DeltaError(f"a delta of {head.base} ({head.nbytes} bytes), not of {base} ({len(blob)} bytes)")
    starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    if starts[-1] != head.words:
        raise DeltaError(f"a delta of {head.words} words that counts {starts[-1]}")
    even = len(blob) // 2 * 2
    limit = even // 2
    whole = blob[:even].view(np.uint16)
    last = _write(whole, starts, places, values, limit)
    if even < len(blob) and last >= 0:
        blob[even] = last & 0xFF
    return head


def _read(delta: memoryview) -> tuple[Head, npt.NDArray[np.uint32], Words, Words]:
    try:
        magic, length = _HEAD.unpack_from(delta)
        if magic != _MAGIC:
            raise DeltaError(f"no delta: it begins with {magic!r}")
        at = _HEAD.size + length
        head = Head(**json.loads(bytes(delta[_HEAD.size : at])))
        chunks = -(-((head.nbytes + 1) // 2) // _CHUNK)
        wanted = at + chunks * 4 + head.words * 4
        if len(delta) != wanted:
            raise DeltaError(f"a delta of {len(delta)} bytes, expected {wanted}")
        counts = np.frombuffer(delta, np.uint32, chunks, at)
        places = np.frombuffer(delta, np.uint16, head.words, at + chunks * 4)
        values = np.frombuffer(delta, np.uint16, head.words, at + chunks * 4 + head.words * 2)
    except (struct.error, TypeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DeltaError(f"no delta: {error!r}") from error
    return head, counts, places, values


def _padded(blob: Bytes) -> Words:
    """As words; an odd byte at the end becomes a word of its own."""
    if len(blob) % 2 == 0:
        return blob.view(np.uint16)
    return np.append(blob, np.uint8(0)).view(np.uint16)


@numba.njit(parallel=True, nogil=True, cache=False)  # type: ignore[untyped-decorator]
def _count(old: Words, new: Words, counts: npt.NDArray[np.uint32]) -> None:  # pragma: no cover
    for chunk in numba.prange(len(counts)):
        first, last = chunk * _CHUNK, min((chunk + 1) * _CHUNK, len(new))
        found = 0
        for i in range(first, last):
            found += old[i] != new[i]  # without a branch, so that it becomes vector instructions
        counts[chunk] = found


@numba.njit(parallel=True, nogil=True, cache=False)  # type: ignore[untyped-decorator]
def _fill(
    old: Words, new: Words, starts: npt.NDArray[np.int64], places: Words, values: Words
) -> None:  # pragma: no cover
    for chunk in numba.prange(len(starts) - 1):
        first, last = chunk * _CHUNK, min((chunk + 1) * _CHUNK, len(new))
        at, end = starts[chunk], starts[chunk + 1]
        for i in range(first, last):
            if at == end:
                break
            # Written in any case and kept if it differs: a branch would be guessed wrong too often.
            places[at] = i - first
            values[at] = new[i]
            at += old[i] != new[i]


@numba.njit(parallel=True, nogil=True, cache=False)  # type: ignore[untyped-decorator]
def _write(
    blob: Words, starts: npt.NDArray[np.int64], places: Words, values: Words, limit: int
) -> int:  # pragma: no cover
    beyond = np.full(len(starts) - 1, -1, dtype=np.int64)
    for chunk in numba.prange(len(starts) - 1):
        first = chunk * _CHUNK
        for k in range(starts[chunk], starts[chunk + 1]):
            i = first + places[k]
            if i < limit:
                blob[i] = values[k]
            else:
                beyond[chunk] = values[k]
    return beyond.max() if len(beyond) else -1
