"""Barrier on the host, outside of collectives.

How long a rank writes to the job's store depends on the model and on the store. Ranks that wait for it in a
collective would occupy their GPUs, so they wait in this barrier first. It has no timeout: a rank that dies
or hangs meanwhile stops the gang, which also ends the wait.
"""

import time
from collections.abc import Sequence
from functools import cache

import torch.distributed as dist

_SHORTEST, _LONGEST = 0.001, 0.2  # seconds between polls


class StoreBarrier:
    """Counter of arrivals in the process group's store. Every rank must wait equally often."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._key = f"barrier/{'-'.join(map(str, ranks))}"
        self._size = len(ranks)
        self._rounds = 0

    def wait(self) -> None:
        """Wait until every rank has arrived."""
        self._rounds += 1
        arrivals, pause = self._store.add(self._key, 1), _SHORTEST
        while arrivals < self._rounds * self._size:
            time.sleep(pause)
            arrivals, pause = self._store.add(self._key, 0), min(2 * pause, _LONGEST)


def store_barrier(ranks: Sequence[int]) -> StoreBarrier:
    """Return the barrier of these ranks, always the same object in this process."""
    return _barrier(tuple(ranks))


@cache
def _barrier(ranks: tuple[int, ...]) -> StoreBarrier:
    return StoreBarrier(ranks)
