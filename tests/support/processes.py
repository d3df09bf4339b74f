"""Process helpers."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple


def runs(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
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
    folders = [Path(f"/proc/{pid}/task") for pid in pids]
    before = {task: _usage(task) for folder in folders for task in folder.iterdir()}
    time.sleep(seconds)
    after = {task: _usage(task) for task in before if task.exists()}
    return [
        task
        for task, usage in after.items()
        if usage.ticks - before[task].ticks > 5 and usage.sleeps - before[task].sleeps < 5
    ]


def _usage(task: Path) -> _Usage:
    fields = (task / "stat").read_text().rsplit(")", 1)[1].split()
    status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
    return _Usage(int(fields[11]) + int(fields[12]), int(status["voluntary_ctxt_switches"]))
