"""Progress lines of stages, and commands whose errors name the step, the cause and the remedy."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from grpo_devcluster.paths import LOGS


class StageError(RuntimeError):
    """A step of the set-up failed; the message is for the user."""


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Print ``name`` when the stage starts and its seconds when it ends."""
    started = time.monotonic()
    print(f"==> {name}", flush=True)
    yield
    print(f"    {name}: {time.monotonic() - started:.1f} s", flush=True)


def run(
    command: Sequence[object],
    *,
    step: str,
    remedy: str,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
) -> str:
    """Run a command and return its output.

    Raises StageError with the step, the end of the output and the remedy.
    """
    LOGS.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(
            [str(part) for part in command],
            env={**os.environ, **(env or {})},
            cwd=cwd,
            input=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise StageError(f"{step}: {error.filename} is not installed. {remedy}") from error
    with (LOGS / "setup.log").open("a") as log:
        log.write(f"$ {' '.join(str(part) for part in command)}\n{done.stdout}\n")
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise StageError(f"{step} failed (exit {done.returncode}):\n{tail}\n{remedy}")
    return done.stdout


def wait_for(what: str, check: Callable[[], bool], timeout: float, log: Path | None = None) -> None:
    """Poll ``check`` until it returns True. Raises StageError with the end of ``log`` after ``timeout`` s."""
    deadline = time.monotonic() + timeout
    while not check():
        if time.monotonic() > deadline:
            tail = "\n".join(log.read_text().splitlines()[-15:]) if log and log.exists() else ""
            raise StageError(f"{what} is not ready after {timeout:.0f} s.\n{tail}\nLogs: {LOGS}")
        time.sleep(0.2)


def fail(error: StageError) -> None:
    """Print the error and exit with code 1."""
    print(f"\nERROR: {error}", file=sys.stderr)
    sys.exit(1)
