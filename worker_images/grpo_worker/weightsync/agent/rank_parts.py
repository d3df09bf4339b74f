"""Parts of a version that an engine's ranks keep: what is read for them, and what each one is sent."""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np

from grpo_worker.weightsync.agent.blobs import Bytes
from grpo_worker.weightsync.agent.chunks import Chunk, Wanted, whole_pieces
from grpo_worker.weightsync.agent.cuts import SCRATCH, Cut, cuts, pieces
from grpo_worker.weightsync.planner.boxes import tensor_of
from grpo_worker.weightsync.planner.rank_parts import BucketPart, Table, part_of
from grpo_worker.weightsync.protocol.agent_stream import FINGERPRINT
from grpo_worker.weightsync.protocol.buffers import item_bytes
from grpo_worker.weightsync.protocol.fingerprint import Fingerprint
from grpo_worker.weightsync.protocol.transfer_plan import TransferPlan


class _Parts:
    """Parts of a plan's buckets that the regions of ``tables`` cover; those of two buckets are kept.

    ``without``: regions that are left out.
    """

    def __init__(self, plan: TransferPlan, tables: Sequence[Table], without: Table | None = None) -> None:
        self._tables = tables
        self._without = without
        self._plan = plan
        self._first = [0, *accumulate(map(len, plan.buckets))]
        self.of = lru_cache(2)(self._of)

    def cuts(self, chunk: Chunk) -> Iterator[Cut]:
        """Yield the cuts of a chunk."""
        part, lines = self.of(chunk.bucket)
        return cuts(chunk.spans, lines, part)

    def _of(self, index: int) -> tuple[BucketPart, list[int]]:
        """Return the part of a bucket, and the bytes of a row of each of the bucket's tensors."""
        tensors = [tensor_of(tensor.shape, tensor.dtype) for tensor in self._plan.buckets[index]]
        lines = [tensor.columns * item_bytes(tensor.dtype) for tensor in tensors]
        return part_of(self._tables, self._first[index], tensors, self._without), lines


class KeptBytes:
    """The bytes of a version that at least one of a host's ranks keeps: those to read, and their sum.

    ``tables``: of the ranks' regions. ``counted``: regions that another host counts; None: there are none.
    ``nbytes``, ``total``: number and sum of the bytes counted so far.
    """

    def __init__(self, plan: TransferPlan, tables: Sequence[Table], counted: Table | None = None) -> None:
        self.nbytes, self.total = 0, 0
        self._plan = plan
        self._parts = _Parts(plan, tables)
        self._counted = self._parts if counted is None else _Parts(plan, tables, counted)
        self._scratch = np.empty(SCRATCH, dtype=np.uint8)

    def wanted(self, index: int, chunk: Chunk) -> Wanted:
        """Return the bytes of bucket ``index`` to read: whole pieces, which can be verified.

        Those of ``chunk`` are among them if it is of this bucket.
        """
        part, lines = self._parts.of(index)
        ranges = {
            number: [(band.top * lines[number], band.bottom * lines[number]) for band in bands]
            for number, bands in part.bands.items()
        }
        for span in chunk.spans if chunk.bucket == index else ():
            of_tensor = ranges.setdefault(span.tensor, [])
            of_tensor.append((span.begin, span.begin + span.nbytes))
        bucket = self._plan.buckets[index]
        return {number: whole_pieces(bucket[number], sorted(found)) for number, found in ranges.items()}

    def count(self, chunk: Chunk, data: Bytes) -> None:
        """Count the kept bytes of a chunk, whose bytes are ``data``, each once."""
        for cut in self._counted.cuts(chunk):
            for piece in pieces(cut, data, self._scratch):
                self.nbytes += len(piece)
                self.total += int(piece.view(np.int8).sum(dtype=np.int64))


class RankPart:
    """Part of each chunk of a version that one rank is sent; chunks come in order. Not thread-safe.

    ``table``: of the regions that the rank keeps. ``sent``: bytes of them so far.
    """

    def __init__(self, plan: TransferPlan, table: Table) -> None:
        self.sent = 0
        self._parts = _Parts(plan, [table])
        self._scratch = np.empty(SCRATCH, dtype=np.uint8)
        self._print = Fingerprint(0)  # of the current bucket
        self._position = 0  # in its part

    def of_chunk(self, chunk: Chunk, data: Bytes) -> Iterator[memoryview]:
        """Yield what the rank is sent of a chunk, whose bytes are ``data``; each view before the next one.

        The bucket's fingerprint follows its last byte.
        """
        if not chunk.start:
            self._print, self._position = Fingerprint(self._parts.of(chunk.bucket)[0].nbytes), 0
        for cut in self._parts.cuts(chunk):
            position = cut.position
            if position > self._position:  # bytes that align a tensor; the fingerprint of zeros is zero
                yield memoryview(bytes(position - self._position))
            for piece in pieces(cut, data, self._scratch):
                self._print.add(position, piece)
                yield piece.data
                position += len(piece)
            self.sent += position - cut.position
            self._position = position
        if chunk.last:
            yield memoryview(FINGERPRINT.pack(self._print.value()))


class RankParts:
    """Parts that a host's ranks are sent; ``tables``: of the regions that they keep, by position."""

    def __init__(self, plan: TransferPlan, tables: Sequence[Table]) -> None:
        self._parts = [RankPart(plan, table) for table in tables]

    @property
    def sent(self) -> list[int]:
        """Bytes that each rank keeps of the chunks so far."""
        return [part.sent for part in self._parts]

    def of_chunk(self, chunk: Chunk, data: Bytes) -> Callable[[int], Iterator[memoryview]]:
        """Return a function that yields what a rank is sent of a chunk; see RankPart."""
        return lambda rank: self._parts[rank].of_chunk(chunk, data)
