"""Byte ranges of each message that one engine rank needs; the trainer ranks send nothing else to it. Pure.

Two kinds of ranges occur. *Used* ranges are bytes of a bucket that the rank copies into its parameters; the
rank learns them while it loads its first version. *Needed* ranges are bytes of a message that must be sent
so that the used ranges arrive. The engine rank computes the needed ranges and publishes them to the trainer
ranks, so both ends cut a message in the same way.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from grpo_worker.weightsync.protocol.buffers import ALIGNED, aligned
from grpo_worker.weightsync.protocol.transfer_plan import Message, Piece

ByteRange = tuple[int, int]  # first byte, and the byte after the last
NeededRanges = list[list[list[ByteRange]]]  # by bucket and message; in each message in order

_MAX_GAP = 256  # sending a gap of up to 1/256 of a bucket is cheaper than sending another range


@dataclass(frozen=True, slots=True)
class Extent:
    """Position of a tensor in its bucket (bytes), and its number of rows."""

    start: int
    nbytes: int
    rows: int


def needed_ranges(
    messages: Sequence[Message], extents: Sequence[Extent], used: Sequence[ByteRange]
) -> list[list[ByteRange]]:
    """Return the byte ranges of each message of a bucket that must be sent so that ``used`` arrives.

    ``extents``: of the bucket's tensors. ``used``: ranges of the bucket, in order and without overlaps.
    """
    gap = max((extent.start + extent.nbytes for extent in extents), default=0) // _MAX_GAP
    return [merged(_needed(message, extents, used), gap, message.nbytes) for message in messages]


def merged(byte_ranges: Iterable[ByteRange], gap: int = 0, end: int | None = None) -> list[ByteRange]:
    """Sort the ranges and merge those that are at most ``gap`` bytes apart.

    With ``end`` (bytes of the whole) each range is first widened to multiples of ALIGNED.
    """
    result: list[ByteRange] = []
    ordered = sorted(byte_ranges)
    if end is not None:
        ordered = [(first // ALIGNED * ALIGNED, min(aligned(last), end)) for first, last in ordered]
    for first, last in ordered:
        if result and first <= result[-1][1] + gap:
            result[-1] = result[-1][0], max(result[-1][1], last)
        else:
            result.append((first, last))
    return result


def received_pieces(pieces: Sequence[Piece], byte_ranges: Sequence[ByteRange]) -> list[tuple[int, Piece]]:
    """Return (first byte in the message, piece) of each piece that lies completely in ``byte_ranges``."""
    received, start = [], 0
    for piece in pieces:
        end = start + piece.nbytes
        if any(first <= start and end <= last for first, last in byte_ranges):
            received.append((start, piece))
        start = end
    return received


def to_json(ranges: NeededRanges) -> str:
    """Return the ranges as JSON."""
    return json.dumps(ranges, separators=(",", ":"))


def from_json(text: str) -> NeededRanges:
    """Parse the output of ``to_json``."""
    return [[[(first, last) for first, last in message] for message in bucket] for bucket in json.loads(text)]


def _needed(message: Message, extents: Sequence[Extent], used: Sequence[ByteRange]) -> list[ByteRange]:
    """Return the used bytes of a message received in place, or the used pieces of a scattered one."""
    if message.start is not None:
        inside = _intersection((message.start, message.start + message.nbytes), used)
        return [(first - message.start, last - message.start) for first, last in inside]
    needed, start = [], 0
    for piece in message.pieces:
        if _intersection(_target_range(piece, extents[piece.tensor]), used):
            needed.append((start, start + piece.nbytes))
        start += piece.nbytes
    return needed


def _target_range(piece: Piece, extent: Extent) -> ByteRange:
    """Return the range of the bucket that a piece is written to.

    Rows are contiguous. Columns are spread over the tensor, so its whole range is returned for them.
    """
    if piece.dim:
        return extent.start, extent.start + extent.nbytes
    row = extent.nbytes // extent.rows
    return extent.start + piece.offset * row, extent.start + (piece.offset + piece.length) * row


def _intersection(byte_range: ByteRange, used: Sequence[ByteRange]) -> list[ByteRange]:
    pairs = [(max(byte_range[0], first), min(byte_range[1], last)) for first, last in used]
    return [(first, last) for first, last in pairs if first < last]
