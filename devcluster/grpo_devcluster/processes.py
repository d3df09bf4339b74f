"""Starts and stops the daemons of the devcluster, each in its own session, tracked by pid files."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from grpo_devcluster.paths import LOGS, RUN

PIDS = RUN / "pids"


def start(name: str, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
    """Start a daemon with its output in ``LOGS/name.log``; do nothing when it is running."""
    if is_running(name):
        return
    PIDS.mkdir(parents=True, exist_ok=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    with log_file(name).open("ab") as log:
        process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
    started = start_time(process.pid)
    (PIDS / name).write_text(f"{process.pid} {started}")


def log_file(name: str) -> Path:
    """Return the log file of a daemon."""
    return LOGS / f"{name}.log"


def is_running(name: str) -> bool:
    """Return whether the daemon is alive, and its pid was not reused by another process."""
    pid, started = _read(name)
    return pid is not None and start_time(pid) == started


def stop(name: str, grace: float = 2.0) -> None:
    """Stop a daemon by SIGTERM, then SIGKILL after ``grace`` seconds; do nothing when it is gone."""
    pid, _ = _read(name)
    if pid is not None and is_running(name):
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace
        while is_running(name) and time.monotonic() < deadline:
            time.sleep(0.1)
        if is_running(name):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(FileNotFoundError):
        (PIDS / name).unlink()


def names() -> list[str]:
    """Return the names of all daemons with a pid file."""
    return sorted(path.name for path in PIDS.glob("*")) if PIDS.is_dir() else []


def _read(name: str) -> tuple[int | None, str]:
    try:
        pid, started = (PIDS / name).read_text().split()
    except (FileNotFoundError, ValueError):
        return None, ""
    return int(pid), started


def start_time(pid: int) -> str:
    """Return the kernel's start time of a live process; "" for a process that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]
