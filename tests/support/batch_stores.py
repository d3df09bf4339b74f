"""Object stores of training pods in this process: references are the arrays themselves."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from grpo_rehearsal.standins.object_store import StandInObjectStore, Stored
from grpo_worker.roles.dispatch import RankInfo
from grpo_worker.roles.shared_batch import ObjectStore, SharedRows

CONTROLLER, TRAINERS = "controller>trainer", "trainer>trainer"


def plain_store(pods: Sequence[str] = ("",) * 64) -> ObjectStore:
    """Return a store of pods that share their memory."""
    return ObjectStore(lambda array: array, lambda _rank, array: array, pods)


class CountedStore:
    """Store of pods with ``gpus`` ranks each. ``nbytes``: fetched bytes by link."""

    def __init__(self, world: int, gpus: int) -> None:
        self.nbytes: Counter[str] = Counter()
        self._objects = StandInObjectStore(self.nbytes)
        self._pods = pods = [f"pod-{rank // gpus}" for rank in range(world)]
        objects = self._objects
        self.store = ObjectStore(objects.put, lambda rank, stored: objects.pass_on(pods[rank], stored), pods)

    def arrays(self, rows: SharedRows, info: RankInfo, reads: Sequence[str]) -> list[np.ndarray]:
        """Let a rank fetch what it reads; return the arrays."""
        references: list[Any] = rows.arguments(info, reads)[1]
        return [self._array(stored, self._pods[info.rank]) for stored in references]

    def _array(self, stored: Stored, pod: str) -> np.ndarray:
        self._objects.fetch(pod, stored)
        array: np.ndarray = stored.value
        return array
