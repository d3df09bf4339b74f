"""Which bytes of each message one engine rank keeps: the others need not travel to it (pure).

An engine's rank says so when it has loaded a version and so knows what it takes. Both ends then cut each
message into the same stretches.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from grpo_worker.weightsync.protocol.buffers import ALIGNED, aligned
from grpo_worker.weightsync.protocol.transfer_plan import Message, Piece

ByteRange = tuple[int, int]  # bytes from the first up to, but not including, the second
Wanted = list[list[list[ByteRange]]]  # by bucket of a source, message and place

_WORTH = 256  # a gap of less than this part of a bucket costs less than another message


@dataclass(frozen=True, slots=True)
class Extent:
    """A tensor's place in its bucket (bytes), and its rows."""

    start: int
    nbytes: int
    rows: int


def wanted(
    messages: Sequence[Message], extents: Sequence[Extent], kept: Sequence[ByteRange]
) -> list[list[ByteRange]]:
    """For each message of a bucket the stretches that must travel, so that the bytes ``kept`` of it come.

    ``extents``: of the bucket's tensors. ``kept``: without overlaps, in order.
    """
    gap = max((extent.start + extent.nbytes for extent in extents), default=0) // _WORTH
    return [merged(_needed(message, extents, kept), gap, message.nbytes) for message in messages]


def merged(byte_ranges: Iterable[ByteRange], gap: int = 0, end: int | None = None) -> list[ByteRange]:
    """The same bytes in order; neighbours at most ``gap`` apart are one. With ``end`` (bytes of the whole)
    each is widened to where devices like it to begin and end."""
    found: list[ByteRange] = []
    for first, last in sorted(byte_ranges):
        if end is not None:
            first, last = first // ALIGNED * ALIGNED, min(aligned(last), end)
        if found and first <= found[-1][1] + gap:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def came(pieces: Sequence[Piece], byte_ranges: Sequence[ByteRange]) -> list[tuple[int, Piece]]:
    """The pieces of a message that lie in what travelled of it, each with its first byte there."""
    found, start = [], 0
    for piece in pieces:
        end = start + piece.nbytes
        if any(first <= start and end <= last for first, last in byte_ranges):
            found.append((start, piece))
        start = end
    return found


def to_json(wanted_of_source: Wanted) -> str:
    return json.dumps(wanted_of_source, separators=(",", ":"))


def from_json(text: str) -> Wanted:
    return [[[(first, last) for first, last in message] for message in bucket] for bucket in json.loads(text)]


def _needed(message: Message, extents: Sequence[Extent], kept: Sequence[ByteRange]) -> list[ByteRange]:
    if message.start is not None:
        inside = _common((message.start, message.start + message.nbytes), kept)
        return [(first - message.start, last - message.start) for first, last in inside]
    found, start = [], 0
    for piece in message.pieces:
        if _common(_home(piece, extents[piece.tensor]), kept):
            found.append((start, start + piece.nbytes))
        start += piece.nbytes
    return found


def _home(piece: Piece, extent: Extent) -> ByteRange:
    """Where in the bucket a piece belongs: rows are one stretch, of columns only the tensor is known."""
    if piece.dim:
        return extent.start, extent.start + extent.nbytes
    row = extent.nbytes // extent.rows
    return extent.start + piece.offset * row, extent.start + (piece.offset + piece.length) * row


def _common(byte_range: ByteRange, kept: Sequence[ByteRange]) -> list[ByteRange]:
    pairs = [(max(byte_range[0], first), min(byte_range[1], last)) for first, last in kept]
    return [(first, last) for first, last in pairs if first < last]
