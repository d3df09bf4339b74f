"""What changed between two versions of a rank's blob: 16-bit words, by their place.

After one step of training about one bf16 weight in a hundred has another bit pattern. A delta names those
words; it is of use where the network is slower than the memory of both ends.
"""

import json
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import numba
import numpy as np
import numpy.typing as npt

_CHUNK = 1 << 16  # words of which a 16-bit number can name one
_BLOCK = 16 * _CHUNK  # words that one thread looks at; they and their marks fit its cache
_HEAD = struct.Struct("<4sI")
_MAGIC = b"GRD1"

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint16]


def warm() -> None:
    """Compile what follows, so that the first version does not wait for it."""
    blob = np.zeros(2, dtype=np.uint8)
    delta = encode(blob, blob, "", "")
    assert delta is not None
    apply(blob, delta, "")


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
    blocks = range(0, len(theirs), _BLOCK)
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        found = list(threads.map(lambda at: _block(ours[at : at + _BLOCK], theirs[at : at + _BLOCK]), blocks))
    words = sum(len(places) for _, places, _ in found)
    if words * 4 > most * len(new):
        return None
    head = json.dumps(asdict(Head(base, digest, len(new), words))).encode()
    head += b" " * (-(_HEAD.size + len(head)) % 8)  # so that the numbers after it are aligned
    parts = [array.data for kind in zip(*found, strict=True) for array in kind]
    return b"".join([_HEAD.pack(_MAGIC, len(head)), head, *parts])


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


class _Scratch(threading.local):
    """Memory of a thread, used again: the first touch of fresh memory takes longer than the comparing."""

    def __init__(self) -> None:
        self.changed = np.empty(_BLOCK, dtype=np.bool_)
        self.places, self.values = (np.empty(_BLOCK + 1, dtype=np.uint16) for _ in range(2))


_scratch = _Scratch()


def _block(old: Words, new: Words) -> tuple[npt.NDArray[np.uint32], Words, Words]:
    """What changed in some chunks: how many words of each, their places, their values."""
    changed = _scratch.changed[: -(-len(new) // 8) * 8]
    changed[len(new) :] = False
    np.not_equal(old, new, out=changed[: len(new)])
    counts = np.zeros(-(-len(new) // _CHUNK), dtype=np.uint32)
    words = _collect(changed.view(np.uint64), new, counts, _scratch.places, _scratch.values)
    return counts, _scratch.places[:words].copy(), _scratch.values[:words].copy()


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _collect(
    eights: npt.NDArray[np.uint64], new: Words,
    counts: npt.NDArray[np.uint32], places: Words, values: Words,
) -> int:  # fmt: skip
    at = 0
    for chunk in range(len(counts)):
        before = at
        for eight in range(chunk * _CHUNK // 8, min((chunk + 1) * _CHUNK // 8, len(eights))):
            marks = eights[eight]  # a byte a word; read once, because what is written might be this
            if marks == 0:
                continue
            for i in range(eight * 8, min(eight * 8 + 8, len(new))):
                # Written in any case and kept if it changed: a branch would be guessed wrong too often.
                places[at] = i - chunk * _CHUNK
                values[at] = new[i]
                at += int(marks & np.uint64(1))
                marks >>= np.uint64(8)
        counts[chunk] = at - before
    return at


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _write(blob: Words, starts: npt.NDArray[np.int64], places: Words, values: Words, limit: int) -> int:
    """The word beyond ``limit``, which is an odd byte; -1: it did not change."""
    beyond = -1
    for chunk in range(len(starts) - 1):
        first = chunk * _CHUNK
        for k in range(starts[chunk], starts[chunk + 1]):
            i = first + places[k]
            if i < limit:
                blob[i] = values[k]
            else:
                beyond = values[k]
    return beyond
