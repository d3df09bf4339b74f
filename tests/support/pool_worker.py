"""An object whose methods misbehave in a worker's process."""

import os
import signal
from pathlib import Path


class Misbehaving:
    """Methods for tests of WorkerPool. Can be pickled."""

    def where(self) -> int:
        return os.getpid()

    def sees(self, name: str) -> bool:
        return name in os.environ

    def is_dumpable(self) -> bool:
        import ctypes

        return bool(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))

    def die(self, times: int, counter: Path) -> int:
        """Kill the own process in the first ``times`` calls; return the number of calls."""
        with counter.open("a") as file:
            file.write("x")
        calls = len(counter.read_text())
        if calls <= times:
            os.kill(os.getpid(), signal.SIGKILL)
        return calls

    def score(self, index: int, answer: str) -> float:
        raise KeyError("ground")
