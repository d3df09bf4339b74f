"""Region source: reads the parameters of the agent's own engine while it serves, for other agents.

It presents each rank as a trainer rank that has published its slices. An answer is at most MOST bytes, and
the ranks answer one request at a time, so memory does not grow with the model or the readers.
"""

import threading
import time
import uuid
from collections.abc import Sequence

from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.agent.engine_stream import EngineStream
from grpo_worker.weightsync.planner.kept_slices import RankBlob, slices_of_kept
from grpo_worker.weightsync.planner.regions import RegionError
from grpo_worker.weightsync.protocol.digest import SIZE
from grpo_worker.weightsync.protocol.link_exchange import TensorRow
from grpo_worker.weightsync.protocol.manifest import Manifest, blob_size
from grpo_worker.weightsync.protocol.region_stream import (
    MOST,
    READ,
    TENSORS,
    pack_request,
    unpack_tensors,
)


class RegionSource:
    """Weights in the engine's ranks while these hold ``version``. ``manifests``: by rank, without digests.

    ``timeout``: seconds in which a rank must send some bytes. ``address``: at which the engine's ranks reach
    this process. Raises EngineError if the engine cannot be read.
    """

    def __init__(self, engine: Engine, version: int, ranks: int, timeout: float, address: str) -> None:
        self.name = uuid.uuid4().hex[:12]
        self._ranks = [threading.Lock() for _ in range(ranks)]
        self._stream = EngineStream(engine, f"{READ}{self.name}", ranks, timeout, address)
        self._used = time.monotonic()
        try:
            if not self._stream.direct:
                raise EngineError("the engine does not support direct loads, and cannot be read")
            self.manifests, self._blobs = self._describe(version, ranks)
        except BaseException:
            self._stream.close()
            raise

    def idle_seconds(self) -> float:
        """Return the seconds since the last read."""
        return time.monotonic() - self._used

    def read(self, rank: int, first: int, end: int) -> tuple[memoryview, str]:
        """Return bytes ``first`` to ``end`` of a rank's blob, and their digest (hex) by the rank.

        Raises ValueError for bytes that do not exist or are more than MOST, and EngineError if the engine
        does not hold the version any more.
        """
        if end - first > MOST:
            raise ValueError(f"{end - first} bytes are asked for, and at most {MOST} are sent at a time")
        request = pack_request(list(self._blobs[rank].parts(first, end)))
        with self._ranks[rank]:
            self._used = time.monotonic()
            try:
                self._stream.ask(rank, request)
                data = self._stream.receive(rank, end - first)
                digest = self._stream.receive(rank, SIZE)
            except EngineError:
                self._stream.close()  # what comes next would be the rest of this answer
                raise
            self._used = time.monotonic()
        return memoryview(data), digest.hex()

    def close(self) -> None:
        """End the connections: the ranks' threads end too."""
        self._stream.close()

    def _describe(self, version: int, ranks: int) -> tuple[list[Manifest], list[RankBlob]]:
        rows = self._tensors(ranks)
        try:
            found = slices_of_kept(rows, self._stream.receive_kept(lambda: False))
        except RegionError as error:
            raise EngineError(f"the engine cannot be read: {error}") from error
        numbers = {row.name: number for number, row in enumerate(rows)}
        manifests = [
            Manifest(version, rank, ranks, blob_size(slices), "", tuple(slices))
            for rank, slices in enumerate(found)
        ]
        return manifests, [RankBlob(slices, [numbers[s.name] for s in slices]) for slices in found]

    def _tensors(self, ranks: int) -> Sequence[TensorRow]:
        """Return the tensors of the version, which must be the same on all ranks."""
        heads = [TENSORS.unpack(self._stream.receive(rank, TENSORS.size)) for rank in range(ranks)]
        packed = [self._stream.receive(rank, nbytes) for rank, (_, nbytes) in enumerate(heads)]
        for rank, (digest, _) in enumerate(heads):
            if digest != heads[0][0]:
                raise EngineError(f"ranks 0 and {rank} of the engine hold different tensors")
        return unpack_tensors(packed[0])
