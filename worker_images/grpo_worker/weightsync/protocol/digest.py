"""Digests of blobs, which trainers publish and rollout agents compare."""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import xxhash

PIECE = 16 << 20  # bytes that one thread hashes at a time


def digest(data: bytes | memoryview) -> str:
    """Return the digest of a blob (hex): the hash of its pieces' hashes, which threads compute in parallel.

    xxh3 detects damage as reliably as a cryptographic hash and is ten times faster. It does not protect
    against forgery.
    """
    view = memoryview(data)
    pieces = [view[start : start + PIECE] for start in range(0, len(view), PIECE)]
    with ThreadPoolExecutor(min(len(pieces), os.cpu_count() or 1) or 1) as threads:
        return digest_of(threads.map(lambda piece: xxhash.xxh3_128_digest(piece), pieces))


def digest_of(pieces: Iterable[bytes]) -> str:
    """Return the digest of a blob from the xxh3 hashes of its pieces of PIECE bytes."""
    return str(xxhash.xxh3_128_hexdigest(b"".join(pieces)))
