"""Stream of an engine rank to its agent, over which the agent reads regions of the rank's parameters. Pure.

The rank greets like one that receives buckets, describes what it holds, and then answers requests, one at a
time. It closes the stream when its parameters are written.
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from grpo_worker.weightsync.planner.regions import Box
from grpo_worker.weightsync.protocol.agent_stream import STREAM
from grpo_worker.weightsync.protocol.link_exchange import TensorRow

READ = f"{STREAM}read-"  # prefix of such a stream's name
MOST = 4 << 20  # bytes of one answer: agent and rank each hold it in memory
# The description: digest of the tensors, and bytes of their list, which follows from the first rank only.
# The table of the regions that the rank keeps comes next; its numbers are those of the list.
TENSORS = struct.Struct("<16sq")
COUNT = struct.Struct("<i")  # of the parts of a request, which follow
_PART = struct.Struct("<5iqi")


@dataclass(frozen=True, slots=True)
class RegionPart:
    """Bytes ``begin`` to ``begin + nbytes`` of a region ``box`` of tensor number ``tensor``, row by row."""

    tensor: int
    box: Box
    begin: int
    nbytes: int


PART_BYTES = _PART.size


def pack_request(parts: Sequence[RegionPart]) -> bytes:
    """Return a request for the bytes of ``parts``, of at most MOST bytes together."""
    rows = (
        _PART.pack(p.tensor, p.box.top, p.box.bottom, p.box.left, p.box.right, p.begin, p.nbytes)
        for p in parts
    )
    return COUNT.pack(len(parts)) + b"".join(rows)


def unpack_parts(data: bytes | bytearray) -> list[RegionPart]:
    """Return the parts of a request from the bytes after its count."""
    return [RegionPart(n, Box(*box), begin, nbytes) for n, *box, begin, nbytes in _PART.iter_unpack(data)]


def pack_tensors(rows: Iterable[TensorRow]) -> bytes:
    """Return the list of a version's tensors as bytes."""
    return zlib.compress(json.dumps([[row.name, row.shape, row.dtype] for row in rows]).encode(), 1)


def unpack_tensors(data: bytes | bytearray) -> list[TensorRow]:
    """Return the list from the output of ``pack_tensors``."""
    return [TensorRow(name, tuple(shape), dtype) for name, shape, dtype in json.loads(zlib.decompress(data))]


def digest_of_tensors(packed: bytes) -> bytes:
    """Return the digest by which ranks show that they have the same list."""
    return hashlib.sha256(packed).digest()[:16]
