"""A job whose real ranks meet faults, one after the other, beside one without any: no bit may differ."""

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from support.at_points import FOLDER, Fault, write_faults
from support.departing import finish, start
from support.faulty_job import HANG_SECONDS
from support.job_outcome import outcome

STEPS = 16  # checkpoints are due after each fourth
# Seconds on two cores that run everything. A death that only the watch for hangs notices takes longer.
DETECTION, HANG_DETECTION, RECOVERY = 15.0, HANG_SECONDS + 45.0, 300.0


@dataclass(frozen=True)
class Run:
    """A finished job. ``seconds``: of its steps. ``ends``: when and why its attempts ended."""

    ledger: list[Any]
    losses: list[Any]
    weights: list[Any]
    seconds: list[float]
    folder: Path

    @property
    def ends(self) -> list[dict[str, Any]]:
        return self.notes("ends")

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        return _lines(self.folder / "job" / "recoveries.jsonl")

    def notes(self, name: str) -> list[dict[str, Any]]:
        """Return what the job noted under a name."""
        return _lines(self.folder / "faults" / f"{name}.jsonl")

    def witness(self, fault: Fault) -> dict[str, Any]:
        return dict(json.loads((self.folder / "faults" / fault.witness).read_text()))

    def same_as(self, undisturbed: "Run") -> None:
        """Assert that samples, losses and weights of all steps are those of the other run."""
        assert self.ledger == undisturbed.ledger, "the same samples, each once"
        assert self.losses == undisturbed.losses
        assert self.weights == undisturbed.weights and len(self.weights) == STEPS


def run_with(folder: Path, faults: list[Fault]) -> Run:
    """Run the job to its end."""
    write_faults(folder / "faults", faults)
    process = start(folder, STEPS, None, "faulty_job", changes=None, **{FOLDER: str(folder / "faults")})
    assert finish(process) == f"Succeeded {STEPS}: {STEPS} steps done"
    ledger, losses, _ = outcome(folder)
    steps = _lines(folder / "job" / "metrics.jsonl")
    weights, seconds = [step["weights"] for step in steps], [step["timing_s/step"] for step in steps]
    return Run(ledger, losses, weights, seconds, folder)


def survived(fault: Fault, disturbed: Run, undisturbed: Run, detection: float = DETECTION) -> str:
    """Assert that a fault fired, was noticed and overcome in time, and changed no bit of any step.

    Returns why the attempt ended.
    """
    witness = disturbed.witness(fault)
    end = next(end for end in disturbed.ends if end["at"] >= witness["at"])
    message = str(end["message"])
    assert str(witness["pid"]) in message or f"rank {fault.rank}" in message.lower(), end
    assert end["at"] - witness["at"] <= detection
    ended = [(datetime.fromisoformat(r["at"]).timestamp() + 1, r) for r in disturbed.recoveries]
    recovery = next(recovery for at, recovery in ended if at >= end["at"])
    assert recovery["seconds"] <= RECOVERY, recovery
    disturbed.same_as(undisturbed)
    return message


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
