"""Rollout side of NIXL: reads blobs from other pods' memory into this pod's memory."""

import base64
import time
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from grpo_worker.weightsync.transport.nixl.agent import NixlAgent, Offer, Region

_POLL_SECONDS = 0.0005
_PART = 64 << 20  # bytes of a read; the end of each shows progress
_READS = 32  # at a time


class ReadError(RuntimeError):
    """A read failed; the contents of the destination must not be used."""


class _Read(NamedTuple):
    """One read: bytes ``source`` of the agent ``peer`` into ``to``, a part of the blob of ``rank``."""

    rank: int
    peer: str
    source: Region
    to: Region


class Importer:
    """Reads many blobs at once. Destinations that are used again stay registered. Not thread-safe."""

    def __init__(self) -> None:
        self._agent: NixlAgent | None = None
        self._pinned: dict[int, tuple[npt.NDArray[np.uint8], Any]] = {}  # by rank

    def read(
        self, offers: Mapping[int, Offer], into: Mapping[int, npt.NDArray[np.uint8]], patience: float
    ) -> None:
        """Read each rank's blob into its array, uint8 [nbytes].

        Raises ReadError after ``patience`` seconds in which no part of any blob has arrived, and after all
        transfers that could still write have ended.
        """
        try:
            if self._agent is None:
                self._agent = NixlAgent()
            for rank in [rank for rank in self._pinned if rank not in into]:
                self._unpin(self._agent, rank)
            blobs = [self._reads(self._agent, rank, offer, into[rank]) for rank, offer in offers.items()]
            # One part of each blob after the other, so that all sources send.
            parts = (part for parts in zip_longest(*blobs) for part in parts if part is not None)
            _transfer(self._agent, parts, patience)
        except Exception as error:
            self.close()
            raise ReadError(repr(error)) from error

    def close(self) -> None:
        """Release memory and connections; the next read opens them again."""
        self._agent = None  # the library ends the transfers of a deleted agent
        self._pinned = {}

    def _reads(self, agent: NixlAgent, rank: int, offer: Offer, to: npt.NDArray[np.uint8]) -> list[_Read]:
        """Return the reads of a blob, for which its memory is registered."""
        if len(to) != offer.nbytes:
            raise ValueError(f"rank {rank} offers {offer.nbytes} bytes, not {len(to)}")
        pinned = self._pinned.get(rank)
        region = Region(to.ctypes.data, len(to))
        if pinned is None or pinned[0] is not to:
            self._unpin(agent, rank)
            self._pinned[rank] = to, agent.register(region)
        peer = agent.add_peer(base64.b64decode(offer.metadata))
        ends = zip(_parts(offer.region), _parts(region), strict=True)
        return [_Read(rank, peer, source, part) for source, part in ends]

    def _unpin(self, agent: NixlAgent, rank: int) -> None:
        pinned = self._pinned.pop(rank, None)
        if pinned is not None:
            agent.deregister(pinned[1])


def _parts(region: Region) -> Iterator[Region]:
    for start in range(0, region.nbytes, _PART):
        yield Region(region.address + start, min(_PART, region.nbytes - start))


def _transfer(agent: NixlAgent, reads: Iterator[_Read], patience: float) -> None:
    """Run ``reads``, a few at a time. Raises TimeoutError if none ends for ``patience`` seconds."""
    running: list[tuple[int, Any]] = []  # rank and handle
    moved = time.monotonic()
    while True:
        while len(running) < _READS and (read := next(reads, None)) is not None:
            running.append((read.rank, agent.begin_read(read.peer, read.source, read.to)))
        if not running:
            return
        ended = [agent.finished(handle) for _, handle in running]
        for (_, handle), done in zip(running, ended, strict=True):
            if done:
                agent.release(handle)
        running = [each for each, done in zip(running, ended, strict=True) if not done]
        if any(ended):
            moved = time.monotonic()
        elif time.monotonic() - moved > patience:
            ranks = ", ".join(str(rank) for rank in sorted({rank for rank, _ in running}))
            raise TimeoutError(f"no part of a blob arrived for {patience:g} s; awaited from ranks {ranks}")
        else:
            time.sleep(_POLL_SECONDS)
