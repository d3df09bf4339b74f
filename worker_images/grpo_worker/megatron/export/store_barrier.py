"""Ranks that wait for each other outside of collectives, for as long as it takes.

A collective has a time-out, and the gang ends when some ranks wait in one for long. How long a rank writes
to the store depends on the model and on the store, so the others wait here first. A rank that dies meanwhile
ends the gang.
"""

import time
from collections.abc import Sequence
from functools import cache

import torch.distributed as dist

_SHORTEST, _LONGEST = 0.001, 0.2  # seconds between two looks


class StoreBarrier:
    """A counter of arrivals in the process group's store. Every rank must wait equally often."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._key = f"barrier/{'-'.join(map(str, ranks))}"
        self._size = len(ranks)
        self._rounds = 0

    def wait(self) -> None:
        """Return when every rank has come."""
        self._rounds += 1
        found, pause = self._store.add(self._key, 1), _SHORTEST
        while found < self._rounds * self._size:
            time.sleep(pause)
            found, pause = self._store.add(self._key, 0), min(2 * pause, _LONGEST)


def store_barrier(ranks: Sequence[int]) -> StoreBarrier:
    """The one barrier of these ranks in this process."""
    return _known(tuple(ranks))


@cache
def _known(ranks: tuple[int, ...]) -> StoreBarrier:
    return StoreBarrier(ranks)
