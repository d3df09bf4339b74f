"""Cuts of a chunk: the bytes of it that one rank keeps, in the order in which the rank gets them. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from grpo_worker.weightsync.agent.blobs import Bytes
from grpo_worker.weightsync.agent.chunks import Span
from grpo_worker.weightsync.planner.boxes import rectangles
from grpo_worker.weightsync.planner.rank_parts import Band, BucketPart

SCRATCH = 256 << 10  # bytes into which pieces of rows are gathered, one rank at a time


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows of a chunk, and the columns of them that a rank keeps.

    ``position``: byte of the rank's part. ``at``: byte of the chunk where the first row begins; negative if
    it begins in the chunk before. ``stride``: bytes of a row. ``columns``: first byte in a row, and the byte
    after the last.
    """

    position: int
    at: int
    rows: int
    stride: int
    columns: tuple[tuple[int, int], ...]


def cuts(spans: Iterable[Span], lines: Sequence[int], part: BucketPart) -> Iterator[Cut]:
    """Yield what a rank keeps of the spans of a chunk. ``lines``: bytes of a row of each of its tensors."""
    for span in spans:
        line = lines[span.tensor]
        for band in part.bands.get(span.tensor, ()):
            for top, bottom, left, right in rectangles(span.begin, span.begin + span.nbytes, line):
                cut = _cut(band, max(top, band.top), min(bottom, band.bottom), left, right)
                if cut is not None:
                    at = span.at + max(top, band.top) * line - span.begin
                    yield Cut(cut[0], at, min(bottom, band.bottom) - max(top, band.top), line, cut[1])


def _cut(
    band: Band, top: int, bottom: int, left: int, right: int
) -> tuple[int, tuple[tuple[int, int], ...]] | None:
    """Return the byte of the part, and the columns, of a rectangle in a band, or None for nothing."""
    columns = tuple((max(a, left), min(b, right)) for a, b in band.columns if a < right and left < b)
    if top >= bottom or not columns:
        return None
    before = sum(max(0, min(b, left) - a) for a, b in band.columns)
    return band.start + (top - band.top) * band.pitch + before, columns


def pieces(cut: Cut, chunk: Bytes, scratch: Bytes) -> Iterator[Bytes]:
    """Yield the bytes of a cut of ``chunk`` (uint8) in order.

    They are views of it or of ``scratch`` (uint8). A piece must be used before the next one is taken.
    """
    width = sum(right - left for left, right in cut.columns)
    if len(cut.columns) == 1 and (width == cut.stride or cut.rows == 1):
        first = cut.at + cut.columns[0][0]
        yield chunk[first : first + width * cut.rows]
        return
    if width > len(scratch) or cut.rows == 1:
        for row in range(cut.rows):
            for left, right in cut.columns:
                yield chunk[cut.at + row * cut.stride + left : cut.at + row * cut.stride + right]
        return
    step = len(scratch) // width
    for row in range(0, cut.rows, step):
        count, place = min(step, cut.rows - row), 0
        gathered = scratch[: count * width].reshape(count, width)
        for left, right in cut.columns:
            first = cut.at + row * cut.stride + left
            block = np.lib.stride_tricks.as_strided(chunk[first:], (count, right - left), (cut.stride, 1))
            gathered[:, place : place + right - left] = block
            place += right - left
        yield gathered.reshape(-1)
