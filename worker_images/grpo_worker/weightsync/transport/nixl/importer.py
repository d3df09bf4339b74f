"""Rollout side of NIXL: reads blobs from other pods' memory into this pod's memory."""

import base64
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from grpo_worker.weightsync.transport.nixl.agent import NixlAgent, Offer, Region

_POLL_SECONDS = 0.0005


class ReadError(RuntimeError):
    """A read failed; the contents of the destination must not be used."""


class Importer:
    """Reads many blobs at once. Destinations that are used again stay registered. Not thread-safe."""

    def __init__(self) -> None:
        self._agent: NixlAgent | None = None
        self._pinned: dict[int, tuple[npt.NDArray[np.uint8], Any]] = {}  # by rank

    def read(
        self, offers: Mapping[int, Offer], into: Mapping[int, npt.NDArray[np.uint8]], deadline: float
    ) -> None:
        """Read each rank's blob into its array, uint8 [nbytes], until ``deadline`` (time.monotonic()).

        Raises ReadError after all transfers that could still write have ended.
        """
        try:
            if self._agent is None:
                self._agent = NixlAgent()
            for rank in [rank for rank in self._pinned if rank not in into]:
                self._unpin(self._agent, rank)
            reads = [self._begin(self._agent, rank, offer, into[rank]) for rank, offer in offers.items()]
            self._wait(self._agent, reads, deadline)
        except Exception as error:
            self.close()
            raise ReadError(repr(error)) from error

    def close(self) -> None:
        """Release memory and connections; the next read opens them again."""
        self._agent = None  # the library ends the transfers of a deleted agent
        self._pinned = {}

    def _begin(self, agent: NixlAgent, rank: int, offer: Offer, to: npt.NDArray[np.uint8]) -> Any:
        if len(to) != offer.nbytes:
            raise ValueError(f"rank {rank} offers {offer.nbytes} bytes, not {len(to)}")
        pinned = self._pinned.get(rank)
        region = Region(to.ctypes.data, len(to))
        if pinned is None or pinned[0] is not to:
            self._unpin(agent, rank)
            self._pinned[rank] = to, agent.register(region)
        peer = agent.add_peer(base64.b64decode(offer.metadata))
        return agent.begin_read(peer, offer.region, region)

    def _unpin(self, agent: NixlAgent, rank: int) -> None:
        pinned = self._pinned.pop(rank, None)
        if pinned is not None:
            agent.deregister(pinned[1])

    @staticmethod
    def _wait(agent: NixlAgent, reads: list[Any], deadline: float) -> None:
        for handle in reads:
            while not agent.finished(handle):
                if time.monotonic() > deadline:
                    raise TimeoutError("not within the time limit")
                time.sleep(_POLL_SECONDS)
            agent.release(handle)
