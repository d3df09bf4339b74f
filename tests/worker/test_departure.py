"""SIGTERM in the middle of a step, to a real process with real ranks: nothing is lost, and no bit changes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_worker.checkpointing.store import complete_steps

PROGRAM = Path(__file__).parents[1] / "support" / "departing_job.py"
STEPS = 4  # a checkpoint is due after step 4, which is the last one


def _start(folder: Path) -> "subprocess.Popen[str]":
    paths = [str(PROGRAM.parents[1]), os.environ.get("PYTHONPATH", ""), *sys.path]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "GRPO_WEIGHTS_DIR": str(folder / "weights"),
        "OMP_NUM_THREADS": "1",
    }
    (folder / "weights").mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), str(folder / "job"), str(STEPS)],
        env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


def _lines(process: "subprocess.Popen[str]") -> Iterator[str]:
    assert process.stdout is not None
    for line in process.stdout:
        yield line.strip()


def _finish(process: "subprocess.Popen[str]") -> str:
    """Return the last line of a process that ends by itself."""
    try:
        lines = list(_lines(process))
        assert process.wait(60) == 0 and lines
        return lines[-1]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _outcome(folder: Path) -> tuple[list[Any], list[Any], bytes]:
    """Return what was trained on, the losses of all steps, and the digests of the weights."""
    ledger = [json.loads(line) for line in (folder / "job" / "ledger.jsonl").read_text().splitlines()]
    steps = [json.loads(line) for line in (folder / "job" / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "actor/loss", "actor/grad_norm", "actor/entropy", "actor/ppo_kl")
    losses = [[step.get(name) for name in names] for step in steps]
    weights = steps[-1]["weights"]
    return [{k: v for k, v in line.items() if k != "attempt"} for line in ledger], losses, weights


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert _finish(_start(folder)) == f"Succeeded {STEPS}: {STEPS} steps done"
    return _outcome(folder)


@pytest.mark.parametrize(
    ("moment", "saved"), [("generates 2", 2), ("updates 3", 3)], ids=["generation", "update"]
)
def test_a_resumed_job_has_the_bits_of_an_undisturbed_one(
    moment: str, saved: int, undisturbed: Any, tmp_path: Path
) -> None:
    process = _start(tmp_path)
    lines = _lines(process)
    assert moment in lines, "the moment never came"
    process.send_signal(signal.SIGTERM)
    checkpoint = f"the checkpoint of step {saved} is complete"
    assert _finish(process) == f"Recovering {saved}: the controller's pod is being deleted; {checkpoint}"
    assert sorted(complete_steps(tmp_path / "job" / "checkpoints")) == [saved]
    assert _finish(_start(tmp_path)) == f"Succeeded {STEPS}: {STEPS} steps done"
    found = _outcome(tmp_path)
    assert found[0] == undisturbed[0], "the same samples"
    assert found[1] == undisturbed[1], "the same losses"
    assert found[2] == undisturbed[2], "the same weights"
