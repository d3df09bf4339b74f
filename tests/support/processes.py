"""Process helpers."""

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


def runs(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it may end between the opening and the reading
        return False
    return state != "Z"


class _Usage(NamedTuple):
    """CPU time of a thread in clock ticks, and how often it went to sleep, since its start."""

    ticks: int
    sleeps: int


def spinning_threads(pids: Iterable[int], seconds: float = 3) -> list[Path]:
    """Watch the processes for some seconds and return the threads that used CPU without ever sleeping.

    Unlike a bound of CPU seconds this holds on a busy machine too, where a spinning thread gets little.
    """
    before = _usages(pids)
    time.sleep(seconds)
    after = _usages(pids)
    return [
        task
        for task in before.keys() & after.keys()
        if after[task].ticks - before[task].ticks > 5 and after[task].sleeps - before[task].sleeps < 5
    ]


def _usages(pids: Iterable[int]) -> dict[Path, _Usage]:
    """Read the usage of every thread; one that ends while the others are read is left out."""
    usages = {}
    for task in [task for pid in pids for task in Path(f"/proc/{pid}/task").iterdir()]:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            usages[task] = _usage(task)
    return usages


def _usage(task: Path) -> _Usage:
    fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
    status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
    return _Usage(int(fields[11]) + int(fields[12]), int(status["voluntary_ctxt_switches"]))
