"""Ranks that wait for each other outside of collectives, for as long as it takes.

A collective has a time-out, and the gang ends when some ranks wait in one for long. How long a rank
writes to the store depends on the model and on the store, so the others await it here first. A rank
that dies meanwhile ends the gang, as ever.
"""

import time
from collections.abc import Sequence
from functools import cache

import torch.distributed as dist

_SHORTEST, _LONGEST = 0.001, 0.2  # seconds between two looks


class Rendezvous:
    """A counter of arrivals in the process group's store. Every rank must meet equally often."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._key = f"rendezvous/{'-'.join(map(str, ranks))}"
        self._size = len(ranks)
        self._met = 0

    def meet(self) -> None:
        """Return when every rank has come."""
        self._met += 1
        found, pause = self._store.add(self._key, 1), _SHORTEST
        while found < self._met * self._size:
            time.sleep(pause)
            found, pause = self._store.add(self._key, 0), min(2 * pause, _LONGEST)


def rendezvous(ranks: Sequence[int]) -> Rendezvous:
    """The one of these ranks in this process."""
    return _known(tuple(ranks))


@cache
def _known(ranks: tuple[int, ...]) -> Rendezvous:
    return Rendezvous(ranks)
