"""The process of ``departing_job`` or of a program like it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


def start(
    folder: Path, steps: int, store: dict[str, Any] | None = None, program: str = "departing_job",
    name: str = "job", changes: dict[str, Any] | None = None, **more: str,
) -> "subprocess.Popen[str]":  # fmt: skip
    """Start a program of this folder.

    ``name``: of the job's folder. ``changes``: of its spec. ``more``: variables of the environment.
    """
    paths = [str(_HERE.parent), os.environ.get("PYTHONPATH", ""), *sys.path]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "GRPO_WEIGHTS_DIR": str(folder / "weights"),
        "OMP_NUM_THREADS": "1",
    } | more  # fmt: skip
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    given = ["--store", json.dumps(store)] if store else []
    given += ["--changes", json.dumps(changes)] if changes else []
    return subprocess.Popen(
        [sys.executable, str(_HERE / f"{program}.py"), str(folder / name), str(steps), *given],
        env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def lines_of(process: "subprocess.Popen[str]") -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line.strip()


def finish(process: "subprocess.Popen[str]") -> str:
    """Return the last line of a process that ends by itself."""
    try:
        lines = list(lines_of(process))
        assert process.wait(60) == 0 and lines
        return lines[-1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
