"""Methods of a trainer rank that watch its process: most run in threads beside its calls."""

import time
from pathlib import Path

import numpy as np

from grpo_worker.profiling.hang import Position, position, progress, write_flight_record
from grpo_worker.profiling.own_time import OWN_TIME, OwnTime
from grpo_worker.profiling.progress import Progress
from grpo_worker.profiling.stacks import write_stacks
from grpo_worker.roles.dispatch import Dispatch, register
from grpo_worker.roles.weight_sync import WEIGHTS

LEAVING = WEIGHTS / "leaving"  # that the shell of the pod creates at SIGTERM; see render/job_pods.py
_LOOK_SECONDS = 0.5


class WatchMethods:
    """What a rank says of itself."""

    _rank: int
    _thread: int | None = None  # identifier of the thread that computes; set by ``start``

    def live(self, seconds: float, heed: bool = True) -> bool:
        """Return after ``seconds``: the caller learns at once when this process ends before.

        ``heed``: return True as soon as the pod is about to end.
        """
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if heed and LEAVING.exists():
                return True
            time.sleep(min(left, _LOOK_SECONDS))
        return False

    def pass_on(self, array: np.ndarray) -> np.ndarray:
        """Return a part of the batch, which this pod then holds for others.

        Runs in a thread like ``position``.
        """
        return array

    def progress(self) -> Progress:
        """Return how far this rank is. Runs in a separate thread, so that a hanging rank answers too."""
        return progress()

    def position(self) -> Position:
        """Return the collectives that this rank has begun, its progress and its current stack.

        Runs in a thread like ``progress``.
        """
        return position(self._rank, self._thread or 0)

    def write_flight_record(self, folder: str) -> None:
        """Write torch's flight recorder of this rank to a folder. Runs in a thread like ``position``."""
        write_flight_record(Path(folder), self._rank)

    def write_stacks(self, folder: str, seconds: int | None) -> str:
        """Write the stacks of this rank, by py-spy; return the file's name. Runs beside the calls."""
        return write_stacks(Path(folder), f"trainer-rank-{self._rank}", seconds)

    @register(Dispatch.ONE_TO_ALL)
    def own_time(self) -> OwnTime:
        """Return the time that this rank has computed itself since the last call."""
        return OWN_TIME.take()
