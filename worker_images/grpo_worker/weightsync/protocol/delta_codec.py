"""Delta codec: the 16-bit words that differ between two versions of a rank's blob.

One training step changes the bit pattern of about one bf16 weight in a hundred. A delta has only those words.
It pays off where the network is slower than the memory of both ends. Both ends pass over the blob once, piece
by piece, so that a piece is compared (or written) and hashed while it is in the CPU's cache.

The delta of a piece is an array of gaps followed by an array of words. A gap is one byte for each changed
word: the number of unchanged words before it. The byte _SKIP stands for that many unchanged words and has no
word of its own. The words are the new values.
"""

import json
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numba
import numpy as np
import numpy.typing as npt
import xxhash

from grpo_worker.common.known_fields import known
from grpo_worker.weightsync.protocol.digest import PIECE, Bounds

_SKIP = 255
_BLOCK = 1 << 17  # words compared at a time; both versions of them fit into a core's cache
_GROUPS = 1 << 14  # groups of four words scanned at a time; a 16-bit number can index them
_HEAD = struct.Struct("<4sI")
_MAGIC = b"GRD3"
_MAX_SHARE = 0.25  # of the blob's size; a larger delta would save too little

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]
Words64 = npt.NDArray[np.uint64]
Read = Callable[[memoryview], None]  # fills the given memory with the next bytes of a delta


def warm() -> None:
    """Compile the functions that ``apply`` needs, so that the first version does not wait for it."""
    one = np.zeros(1, dtype=np.uint16)
    _write(one, np.zeros(1, dtype=np.uint8), one, np.zeros(3, dtype=np.int64))


class DeltaError(ValueError):
    """The delta is damaged or belongs to another blob; the caller must fetch the whole blob."""


@dataclass(frozen=True, slots=True)
class Head:
    """Header of a delta.

    ``base``: digest of the blob that the delta changes. ``nbytes``: size of that blob.
    ``gaps``, ``words``: number of gaps and of words of each piece.
    """

    base: str
    nbytes: int
    gaps: tuple[int, ...]
    words: tuple[int, ...]


def encode(
    old: Bytes, new: Bytes, base: str, bounds: Sequence[Bounds]
) -> tuple[bytes, list[bytes | memoryview] | None]:
    """Return the digests of the pieces of ``new``, and the delta from ``old`` to it as a list of buffers.

    ``base``: digest of ``old``. ``bounds``: of the pieces; other bytes are not compared. The delta is None if
    it would be too large. ``old`` and ``new`` are uint8 [bytes]. Raises DeltaError if their sizes differ.
    """
    if len(old) != len(new):
        raise DeltaError(f"blobs of {len(old)} and {len(new)} bytes have no delta")
    with _threads() as threads:
        pieces = list(threads.map(lambda piece: _compare(old[slice(*piece)], new[slice(*piece)]), bounds))
    digests = b"".join(piece.digest for piece in pieces)
    gaps, words = tuple(len(piece.gaps) for piece in pieces), tuple(len(piece.words) for piece in pieces)
    if sum(gaps) + 2 * sum(words) > _MAX_SHARE * len(new):
        return digests, None
    head = json.dumps(asdict(Head(base, len(new), gaps, words))).encode()
    arrays = [array for piece in pieces for array in (piece.gaps, piece.words)]
    return digests, [_HEAD.pack(_MAGIC, len(head)), head, *(array.data.cast("B") for array in arrays)]


def apply(blob: Bytes, base: str, bounds: Sequence[Bounds], read: Read) -> tuple[bytes, int]:
    """Apply a delta to ``blob`` (uint8 [bytes], digest ``base``) in place while the delta is received.

    ``bounds``: of its pieces. Returns the new digests of the pieces, which the caller must compare, and the
    delta's size. Raises DeltaError before any write if the delta has another base, and possibly after some
    writes if it is damaged.
    """
    head, size = _read_head(read)
    if head.base != base or head.nbytes != len(blob):
        raise DeltaError(f"a delta of {head.base} ({head.nbytes} bytes), not of {base} ({len(blob)} bytes)")
    sizes = list(zip(head.gaps, head.words, strict=False))
    if len(bounds) != len(sizes) or any(not 0 <= words <= gaps <= PIECE for gaps, words in sizes):
        raise DeltaError(f"a delta of the pieces {sizes}, expected {len(bounds)}")
    jobs = []
    with _threads() as threads:
        for piece, (gap_count, word_count) in zip(bounds, sizes, strict=True):
            gaps, words = np.empty(gap_count, dtype=np.uint8), np.empty(word_count, dtype=np.uint16)
            read(gaps.data)
            read(words.data.cast("B"))
            size += gap_count + 2 * word_count
            jobs.append(threads.submit(_write_piece, blob[slice(*piece)], gaps, words))
        return b"".join(job.result() for job in jobs), size


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(os.cpu_count() or 1, 16))


def _read_head(read: Read) -> tuple[Head, int]:
    """Return the header and its size in bytes. Raises DeltaError if it is not a header."""
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
        return Head(**known(Head, data), gaps=gaps, words=words), _HEAD.size + length
    except (KeyError, TypeError, ValueError) as error:
        raise DeltaError(f"no delta: {error}") from error


def _padded(piece: Bytes) -> Words64:
    """Return the piece as groups of four words; the last group is padded with zeros."""
    missing = -len(piece) % 8
    return (np.append(piece, np.zeros(missing, np.uint8)) if missing else piece).view(np.uint64)


@dataclass(frozen=True, slots=True)
class _PieceDelta:
    """Delta of a piece, and the digest of its new bytes."""

    digest: bytes
    gaps: Bytes
    words: Words


def _compare(old: Bytes, new: Bytes) -> _PieceDelta:
    before, after, hasher = _padded(old), _padded(new), xxhash.xxh3_128()
    words = np.empty(4 * len(after) + 1, dtype=np.uint16)
    gaps = np.empty(4 * len(after) * (_SKIP + 1) // _SKIP + 1, dtype=np.uint8)
    positions = np.empty(_BLOCK + 1, dtype=np.uint32)
    word_count = gap_count = next_word = 0
    for first in range(0, len(after), _BLOCK // 4):
        until = first + _BLOCK // 4
        changed = _collect(before[:until], after[:until], first, positions, words[word_count:])
        gap_count, next_word = _write_gaps(positions[:changed], next_word, gaps, gap_count)
        word_count += changed
        hasher.update(new[8 * first : 8 * until].data)
    return _PieceDelta(hasher.digest(), gaps[:gap_count].copy(), words[:word_count].copy())


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _collect(old: Words64, new: Words64, first: int, positions: npt.NDArray[np.uint32], values: Words) -> int:
    """Write positions and values of the words that changed from group ``first`` on; return their number.

    Every candidate is written, and the index advances only if it changed: a branch would be mispredicted too
    often.
    """
    low, word = np.uint64(0xFFFF), np.uint64(16)
    candidates = np.empty(_GROUPS, dtype=np.uint16)
    count = 0
    for start in range(first, len(new), _GROUPS):
        found = 0
        for i in range(min(_GROUPS, len(new) - start)):
            candidates[found] = i
            found += int(old[start + i] != new[start + i])
        for k in range(found):
            i = start + int(candidates[k])
            changed, now = old[i] ^ new[i], new[i]
            for position in range(4 * i, 4 * i + 4):
                positions[count] = position
                values[count] = now & low
                count += int((changed & low) != 0)
                changed >>= word
                now >>= word
    return count


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _write_gaps(positions: npt.NDArray[np.uint32], next_word: int, gaps: Bytes, at: int) -> tuple[int, int]:
    """Write the gaps before ``positions`` to ``gaps`` from index ``at`` on.

    ``next_word``: word after the last position of the previous call. Return the new ``at`` and ``next_word``.
    """
    for k in range(len(positions)):
        position = int(positions[k])
        while position - next_word >= _SKIP:
            gaps[at] = _SKIP
            at += 1
            next_word += _SKIP
        gaps[at] = position - next_word
        at += 1
        next_word = position + 1
    return at, next_word


def _write_piece(piece: Bytes, gaps: Bytes, values: Words) -> bytes:
    """Write the new words into a piece and return the piece's digest.

    Raises DeltaError before any write if the gaps do not match the words.
    """
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
        piece[even] = values[-1] & 0xFF  # last byte of a piece of odd size
    hasher.update(piece[even:].data)
    return hasher.digest()


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _write(blob: Words, gaps: Bytes, values: Words, state: npt.NDArray[np.int64]) -> None:
    """Write the words that lie in ``blob``.

    ``state``: gaps read so far, values written so far, and the word after them; updated in place.
    """
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
