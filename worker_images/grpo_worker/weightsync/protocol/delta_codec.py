"""What changed between two versions of a rank's blob: 16-bit words, by their place.

After one step of training about one bf16 weight in a hundred has another bit pattern. A delta names those
words; it is of use where the network is slower than the memory of both ends. Both ends go over the blob once,
piece by piece: what is found out about a piece, and its digest, come while it is in a cache.

For each piece a delta has a byte for each word that changed, how many before it did not, and then the words
as they are now. A byte of SKIP stands for that many unchanged words and for no word of its own.
"""

import json
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numba
import numpy as np
import numpy.typing as npt
import xxhash

from grpo_worker.weightsync.protocol.digest import PIECE, digest_of

_SKIP = 255
_BLOCK = 1 << 17  # words that are looked at at once, in both versions: they fit a core's cache
_LOOK = 1 << 14  # of four words each: few enough for a 16-bit number to name one
_HEAD = struct.Struct("<4sI")
_MAGIC = b"GRD3"
_MOST = 0.25  # of a blob; a larger delta is not worth the while

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
Words64 = npt.NDArray[np.uint64]
Read = Callable[[memoryview], None]


def warm() -> None:
    """Compile what ``apply`` needs, so that the first version does not wait for it."""
    one = np.zeros(1, dtype=np.uint16)
    _write(one, np.zeros(1, dtype=np.uint8), one, np.zeros(3, dtype=np.int64))


class DeltaError(ValueError):
    """A delta that does not belong here; the whole blob is wanted instead."""


@dataclass(frozen=True, slots=True)
class Head:
    """``base``: digest of the blob before; ``nbytes``: its size. Of each piece, ``words``: that changed;
    ``gaps``: bytes that say where they are."""

    base: str
    nbytes: int
    gaps: tuple[int, ...]
    words: tuple[int, ...]


def encode(old: Bytes, new: Bytes, base: str) -> tuple[str, list[bytes | memoryview] | None]:
    """Digest of ``new``, and the parts of the delta to it from ``old`` (uint8 [bytes], same size) of digest
    ``base``; None when it would take too much of the blob. Raises DeltaError for blobs of other sizes."""
    if len(old) != len(new):
        raise DeltaError(f"blobs of {len(old)} and {len(new)} bytes have no delta")
    with _threads() as threads:
        places = range(0, len(new), PIECE)
        found = list(threads.map(lambda at: _compared(old[at : at + PIECE], new[at : at + PIECE]), places))
    digest = digest_of(piece.digest for piece in found)
    gaps, words = tuple(len(piece.gaps) for piece in found), tuple(len(piece.values) for piece in found)
    if sum(gaps) + 2 * sum(words) > _MOST * len(new):
        return digest, None
    head = json.dumps(asdict(Head(base, len(new), gaps, words))).encode()
    arrays = [array for piece in found for array in (piece.gaps, piece.values)]
    return digest, [_HEAD.pack(_MAGIC, len(head)), head, *(array.data.cast("B") for array in arrays)]


def apply(blob: Bytes, base: str, read: Read) -> tuple[str, int]:
    """Turn ``blob`` (uint8 [bytes], of digest ``base``) into what a delta leads to, in place, while it comes.

    ``read`` fills what it is given with the delta's next bytes. Returns the digest of the blob, which the
    caller compares, and the delta's size. Raises DeltaError for one of something else, before it writes, and
    for one that is damaged, when parts may have been written.
    """
    head, size = _head(read)
    if head.base != base or head.nbytes != len(blob):
        raise DeltaError(f"a delta of {head.base} ({head.nbytes} bytes), not of {base} ({len(blob)} bytes)")
    places = range(0, len(blob), PIECE)
    sizes = list(zip(head.gaps, head.words, strict=False))
    if len(places) != len(sizes) or any(not 0 <= words <= gaps <= PIECE for gaps, words in sizes):
        raise DeltaError(f"a delta of the pieces {sizes}, expected {len(places)}")
    jobs = []
    with _threads() as threads:
        for at, (count, words) in zip(places, sizes, strict=True):
            gaps, values = np.empty(count, dtype=np.uint8), np.empty(words, dtype=np.uint16)
            read(gaps.data)
            read(values.data.cast("B"))
            size += count + 2 * words
            jobs.append(threads.submit(_written, blob[at : at + PIECE], gaps, values))
        return digest_of(job.result() for job in jobs), size


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, 16))


def _head(read: Read) -> tuple[Head, int]:
    """And its size."""
    try:
        start = bytearray(_HEAD.size)
        read(memoryview(start))
        magic, length = _HEAD.unpack(start)
        if magic != _MAGIC or length > 1 << 24:
            raise ValueError(f"it begins with {magic!r}")
        text = bytearray(length)
        read(memoryview(text))
        data = json.loads(text)
        gaps, words = (tuple(int(count) for count in data.pop(name)) for name in ("gaps", "words"))
        return Head(**data, gaps=gaps, words=words), _HEAD.size + length
    except (KeyError, TypeError, ValueError) as error:
        raise DeltaError(f"no delta: {error}") from error


def _padded(piece: Bytes) -> Words64:
    """As numbers of four words; the last bytes of a blob get zeros after them."""
    missing = -len(piece) % 8
    return (np.append(piece, np.zeros(missing, np.uint8)) if missing else piece).view(np.uint64)


@dataclass(frozen=True, slots=True)
class _Compared:
    """Of a piece: the digest, where the words are that changed, and what they are now."""

    digest: bytes
    gaps: Bytes
    values: Words


def _compared(old: Bytes, new: Bytes) -> _Compared:
    before, after, hasher = _padded(old), _padded(new), xxhash.xxh3_128()
    values = np.empty(4 * len(after) + 1, dtype=np.uint16)
    gaps = np.empty(4 * len(after) * (_SKIP + 1) // _SKIP + 1, dtype=np.uint8)
    places = np.empty(_BLOCK + 1, dtype=np.uint32)
    words = count = beyond = 0
    for first in range(0, len(after), _BLOCK // 4):
        until = first + _BLOCK // 4
        found = _collect(before[:until], after[:until], first, places, values[words:])
        count, beyond = _told(places[:found], beyond, gaps, count)
        words += found
        hasher.update(new[8 * first : 8 * until].data)
    return _Compared(hasher.digest(), gaps[:count].copy(), values[:words].copy())


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _collect(old: Words64, new: Words64, first: int, places: npt.NDArray[np.uint32], values: Words) -> int:
    """How many words changed from number ``first`` on; their places and values.

    Each is written in any case and kept if it changed: a branch would be guessed wrong too often.
    """
    low, word = np.uint64(0xFFFF), np.uint64(16)
    some = np.empty(_LOOK, dtype=np.uint16)
    at = 0
    for start in range(first, len(new), _LOOK):
        found = 0
        for i in range(min(_LOOK, len(new) - start)):
            some[found] = i
            found += int(old[start + i] != new[start + i])
        for k in range(found):
            i = start + int(some[k])
            changed, now = old[i] ^ new[i], new[i]
            for place in range(4 * i, 4 * i + 4):
                places[at] = place
                values[at] = now & low
                at += int((changed & low) != 0)
                changed >>= word
                now >>= word
    return at


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _told(places: npt.NDArray[np.uint32], beyond: int, gaps: Bytes, at: int) -> tuple[int, int]:
    """Write the gaps before ``places`` from ``at`` on; where they end, and the word after the last place."""
    for k in range(len(places)):
        place = int(places[k])
        while place - beyond >= _SKIP:
            gaps[at] = _SKIP
            at += 1
            beyond += _SKIP
        gaps[at] = place - beyond
        at += 1
        beyond = place + 1
    return at, beyond


def _written(piece: Bytes, gaps: Bytes, values: Words) -> bytes:
    """Write a piece's new words into it; the digest of the piece. Raises DeltaError before it writes."""
    words = len(gaps) - np.count_nonzero(gaps == _SKIP)
    if words != len(values):
        raise DeltaError(f"a delta of {len(values)} words with places for {words}")
    even = len(piece) // 2 * 2
    whole, hasher, state = piece[:even].view(np.uint16), xxhash.xxh3_128(), np.zeros(3, dtype=np.int64)
    for first in range(0, len(whole), _BLOCK):
        _write(whole[: first + _BLOCK], gaps, values, state)
        hasher.update(piece[2 * first : min(2 * (first + _BLOCK), even)].data)
    if state[1] < words:
        last = int(state[2]) + int(gaps[state[0] :].sum(dtype=np.int64))
        if state[1] < words - 1 or last != len(whole) or even == len(piece):
            raise DeltaError(f"a delta with a place for word {last} of {len(whole)}")
        piece[even] = values[-1] & 0xFF  # an odd byte
    hasher.update(piece[even:].data)
    return hasher.digest()


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _write(blob: Words, gaps: Bytes, values: Words, state: npt.NDArray[np.int64]) -> None:
    """The words up to the end of ``blob``. ``state``: gaps and values so far, and the word after them."""
    gap_at, value_at, after = state
    while gap_at < len(gaps):
        gap = int(gaps[gap_at])
        if gap == _SKIP:
            after += _SKIP
        elif after + gap < len(blob):
            blob[after + gap] = values[value_at]
            after += gap + 1
            value_at += 1
        else:
            break
        gap_at += 1
    state[:] = gap_at, value_at, after
