"""The process of ``departing_job`` or of a program like it, and what its job has done."""

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
    folder: Path, steps: int, store: dict[str, Any] | None = None, program: str = "departing_job", **more: str
) -> "subprocess.Popen[str]":
    """Start a program of this folder. ``more``: variables of its environment."""
    paths = [str(_HERE.parent), os.environ.get("PYTHONPATH", ""), *sys.path]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "GRPO_WEIGHTS_DIR": str(folder / "weights"),
        "OMP_NUM_THREADS": "1",
    } | more  # fmt: skip
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    given = [json.dumps(store)] if store else []
    return subprocess.Popen(
        [sys.executable, str(_HERE / f"{program}.py"), str(folder / "job"), str(steps), *given],
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


def outcome(folder: Path) -> tuple[list[Any], list[Any], Any]:
    """Return what was trained on, the losses of all steps, and the digests of the weights."""
    return outcome_of(*((folder / "job" / f"{name}.jsonl").read_text() for name in ("ledger", "metrics")))


def outcome_of(ledger: str, metrics: str) -> tuple[list[Any], list[Any], Any]:
    """Return the same of the text of both logs."""
    samples, steps = ([json.loads(line) for line in text.splitlines()] for text in (ledger, metrics))
    names = ("step", "actor/loss", "actor/grad_norm", "actor/entropy", "actor/ppo_kl")
    losses = [[step.get(name) for name in names] for step in steps]
    return (
        [{k: v for k, v in line.items() if k != "attempt"} for line in samples],
        losses,
        steps[-1]["weights"],
    )
