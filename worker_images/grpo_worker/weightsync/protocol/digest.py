"""Digests of blobs."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import xxhash

PIECE = 16 << 20  # bytes that one thread digests at a time


def digest(data: bytes | memoryview) -> str:
    """Digest of a blob, hex: over the digests of its pieces, which threads take side by side.

    xxh3 finds damage as surely as a cryptographic hash, at ten times its speed; nobody is kept from
    forging a blob by it.
    """
    view = memoryview(data)
    pieces = [view[start : start + PIECE] for start in range(0, len(view), PIECE)]
    with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1) or 1) as threads:
        return digest_of(threads.map(lambda piece: xxhash.xxh3_128_digest(piece), pieces))


def digest_of(pieces: Iterable[bytes]) -> str:
    """Digest of a blob whose pieces of PIECE bytes have these."""
    return str(xxhash.xxh3_128_hexdigest(b"".join(pieces)))
