"""Real ranks that die or hang at named points: nothing is lost, and no bit of any step changes.

One job has all faults, one after the other; it is compared with one that has none.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from support.at_points import (
    AFTER_MARKER,
    BACKWARD,
    BEFORE_MARKER,
    BETWEEN,
    FOLDER,
    FORWARD,
    FROZEN,
    GENERATION,
    HANG,
    LOAD,
    OPTIMIZER,
    TRUNCATED,
    UPDATE,
    Fault,
    write_faults,
)
from support.departing import finish, start
from support.faulty_job import HANG_SECONDS
from support.job_outcome import outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # fourteen starts of two ranks
STEPS = 16  # checkpoints are due after each fourth
# Seconds on two cores that run everything. A death that only the watch for hangs notices takes longer.
DETECTION, HANG_DETECTION, RECOVERY = 15.0, HANG_SECONDS + 45.0, 300.0
FAULTS = [
    Fault(BETWEEN, 2, 1),
    Fault(GENERATION, 3, 0),
    Fault(FORWARD, 4, 1),
    Fault(BEFORE_MARKER, 4, 0),
    Fault(BACKWARD, 7, 1),
    Fault(LOAD, 0, 0),  # while the gang recovers from the fault before
    Fault(OPTIMIZER, 8, 0),
    Fault(AFTER_MARKER, 8, 0),  # a step or two later
    Fault(TRUNCATED, 12, 1),
    Fault(UPDATE, 13, 1),
    Fault(HANG, 14, 0),
    Fault(FROZEN, 15, 1),
]


@dataclass(frozen=True)
class Run:
    """A finished job. ``ends``: when and why its attempts ended."""

    ledger: list[Any]
    losses: list[Any]
    weights: list[Any]
    folder: Path

    @property
    def ends(self) -> list[dict[str, Any]]:
        return _lines(self.folder / "faults" / "ends.jsonl")

    @property
    def recoveries(self) -> list[dict[str, Any]]:
        return _lines(self.folder / "job" / "recoveries.jsonl")


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _run(folder: Path, faults: list[Fault]) -> Run:
    write_faults(folder / "faults", faults)
    process = start(folder, STEPS, None, "faulty_job", **{FOLDER: str(folder / "faults")})
    assert finish(process) == f"Succeeded {STEPS}: {STEPS} steps done"
    ledger, losses, _ = outcome(folder)
    weights = [step["weights"] for step in _lines(folder / "job" / "metrics.jsonl")]
    return Run(ledger, losses, weights, folder)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = _run(tmp_path_factory.mktemp("undisturbed"), [])
    assert not run.ends and not run.recoveries
    return run


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return _run(tmp_path_factory.mktemp("disturbed"), FAULTS)


def _survived(point: str, disturbed: Run, undisturbed: Run) -> None:
    """Assert that the fault fired, was noticed and overcome in time, and changed no bit of any step."""
    (fault,) = [fault for fault in FAULTS if fault.point == point]
    witness = json.loads((disturbed.folder / "faults" / fault.witness).read_text())
    end = next(end for end in disturbed.ends if end["at"] >= witness["at"])
    assert str(witness["pid"]) in end["message"] or f"rank {fault.rank} " in end["message"], end
    stands = point in (HANG, FROZEN)
    assert end["at"] - witness["at"] <= (HANG_DETECTION if stands else DETECTION)
    ended = [(datetime.fromisoformat(r["at"]).timestamp() + 1, r) for r in disturbed.recoveries]
    recovery = next(recovery for at, recovery in ended if at >= end["at"])
    assert recovery["seconds"] <= RECOVERY, recovery
    assert disturbed.ledger == undisturbed.ledger, "the same samples, each once"
    assert disturbed.losses == undisturbed.losses
    assert disturbed.weights == undisturbed.weights and len(disturbed.weights) == STEPS


@pytest.mark.fault(
    row="1",
    point="SIGKILL of a rank between two steps",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_between_two_steps(disturbed: Run, undisturbed: Run) -> None:
    _survived(BETWEEN, disturbed, undisturbed)


@pytest.mark.fault(
    row="1",
    point="SIGKILL of a rank while samples are generated",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_while_samples_are_generated(disturbed: Run, undisturbed: Run) -> None:
    _survived(GENERATION, disturbed, undisturbed)


@pytest.mark.fault(
    row="2",
    point="SIGKILL of a rank in the forward pass, before the last layer",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_in_a_forward_pass(disturbed: Run, undisturbed: Run) -> None:
    _survived(FORWARD, disturbed, undisturbed)


@pytest.mark.fault(
    row="2",
    point="SIGKILL of a rank in the backward pass",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_in_a_backward_pass(disturbed: Run, undisturbed: Run) -> None:
    _survived(BACKWARD, disturbed, undisturbed)


@pytest.mark.fault(
    row="3",
    point="SIGKILL of a rank in the optimizer step, after its own weights changed and "
    "before they are gathered",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_in_the_optimizer_when_only_its_own_weights_are_new(
    disturbed: Run, undisturbed: Run
) -> None:
    _survived(OPTIMIZER, disturbed, undisturbed)


@pytest.mark.fault(
    row="3",
    point="SIGKILL of rank 0 before the commit marker of a checkpoint is renamed into place",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_before_the_marker_of_a_checkpoint(disturbed: Run, undisturbed: Run) -> None:
    _survived(BEFORE_MARKER, disturbed, undisturbed)


@pytest.mark.fault(
    row="3",
    point="SIGKILL of rank 0 after the commit marker is in place, before anybody knows",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_after_the_marker_of_a_checkpoint(disturbed: Run, undisturbed: Run) -> None:
    _survived(AFTER_MARKER, disturbed, undisturbed)


@pytest.mark.fault(
    row="14",
    point="SIGKILL of a rank in the middle of the staging of a version",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
    partial="engines are stand-ins",
)
def test_a_rank_dies_in_the_middle_of_a_weight_update(disturbed: Run, undisturbed: Run) -> None:
    _survived(UPDATE, disturbed, undisturbed)


@pytest.mark.fault(
    row="1",
    point="SIGKILL of a rank while the gang loads a checkpoint after another death",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_while_the_gang_loads_after_another_death(disturbed: Run, undisturbed: Run) -> None:
    _survived(LOAD, disturbed, undisturbed)


@pytest.mark.fault(
    row="22",
    point="a file of the newest checkpoint is truncated, then a rank is killed",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_when_the_newest_checkpoint_is_truncated(disturbed: Run, undisturbed: Run) -> None:
    _survived(TRUNCATED, disturbed, undisturbed)
    (fault,) = [fault for fault in FAULTS if fault.point == TRUNCATED]
    fired = json.loads((disturbed.folder / "faults" / fault.witness).read_text())["at"]
    restored = [r["step"] for r in _lines(disturbed.folder / "faults" / "restores.jsonl") if r["at"] > fired]
    assert restored[0] == 4, "the checkpoint of step 8 was used"


@pytest.mark.fault(
    row="4",
    point="a rank never returns in the forward pass",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 105 s (hangSeconds 60), interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
    partial="no lock of Python, no GPU that spins, no NCCL",
)
def test_a_rank_hangs_in_a_forward_pass(disturbed: Run, undisturbed: Run) -> None:
    _survived(HANG, disturbed, undisturbed)
    assert any("read_a_lost_disk" in end["message"] for end in disturbed.ends), "its line is not named"


@pytest.mark.fault(
    row="4",
    point="SIGSTOP of a rank in the forward pass",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 105 s (hangSeconds 60), interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
    partial="no lock of Python, no GPU that spins, no NCCL",
)
def test_a_rank_freezes_in_a_forward_pass(disturbed: Run, undisturbed: Run) -> None:
    _survived(FROZEN, disturbed, undisturbed)
    assert any("does not respond" in end["message"] for end in disturbed.ends)


def test_every_fault_ended_one_attempt(disturbed: Run) -> None:
    assert len(disturbed.ends) == len(FAULTS)
    for recovery in disturbed.recoveries:
        assert sum(recovery["parts"].values()) == pytest.approx(recovery["seconds"], abs=0.01)
