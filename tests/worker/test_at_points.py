"""Real ranks that die at named points: nothing is lost, and no bit of any step changes.

One job has all faults, one after the other; it is compared with one that has none.
"""

import pytest

from support.at_points import (
    AFTER_MARKER,
    BACKWARD,
    BEFORE_MARKER,
    BETWEEN,
    FORWARD,
    GENERATION,
    LOAD,
    OPTIMIZER,
    TRUNCATED,
    UPDATE,
    Fault,
)
from support.disturbed_job import Run, run_with, survived

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # twelve starts of two ranks
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
]


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_with(tmp_path_factory.mktemp("disturbed"), FAULTS)


def _fault(point: str) -> Fault:
    (fault,) = [fault for fault in FAULTS if fault.point == point]
    return fault


def _survived(point: str, disturbed: Run, undisturbed: Run) -> str:
    return survived(_fault(point), disturbed, undisturbed)


@pytest.mark.fault(
    row="1",
    point="SIGKILL of a rank between two steps",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_between_two_steps(disturbed: Run, undisturbed_job: Run) -> None:
    _survived(BETWEEN, disturbed, undisturbed_job)


@pytest.mark.fault(
    row="1",
    point="SIGKILL of a rank while samples are generated",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_while_samples_are_generated(disturbed: Run, undisturbed_job: Run) -> None:
    _survived(GENERATION, disturbed, undisturbed_job)


@pytest.mark.fault(
    row="2",
    point="SIGKILL of a rank in the forward pass, before the last layer",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_in_a_forward_pass(disturbed: Run, undisturbed_job: Run) -> None:
    _survived(FORWARD, disturbed, undisturbed_job)


@pytest.mark.fault(
    row="2",
    point="SIGKILL of a rank in the backward pass",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_in_a_backward_pass(disturbed: Run, undisturbed_job: Run) -> None:
    _survived(BACKWARD, disturbed, undisturbed_job)


@pytest.mark.fault(
    row="3",
    point="SIGKILL of a rank in the optimizer step, after its own weights changed and "
    "before they are gathered",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_in_the_optimizer_when_only_its_own_weights_are_new(
    disturbed: Run, undisturbed_job: Run
) -> None:
    _survived(OPTIMIZER, disturbed, undisturbed_job)


@pytest.mark.fault(
    row="3",
    point="SIGKILL of rank 0 before the commit marker of a checkpoint is renamed into place",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_before_the_marker_of_a_checkpoint(disturbed: Run, undisturbed_job: Run) -> None:
    _survived(BEFORE_MARKER, disturbed, undisturbed_job)


@pytest.mark.fault(
    row="3",
    point="SIGKILL of rank 0 after the commit marker is in place, before anybody knows",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_after_the_marker_of_a_checkpoint(disturbed: Run, undisturbed_job: Run) -> None:
    _survived(AFTER_MARKER, disturbed, undisturbed_job)


@pytest.mark.fault(
    row="14",
    point="SIGKILL of a rank in the middle of the staging of a version",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
    partial="engines are stand-ins",
)
def test_a_rank_dies_in_the_middle_of_a_weight_update(disturbed: Run, undisturbed_job: Run) -> None:
    _survived(UPDATE, disturbed, undisturbed_job)


@pytest.mark.fault(
    row="1",
    point="SIGKILL of a rank while the gang loads a checkpoint after another death",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_while_the_gang_loads_after_another_death(disturbed: Run, undisturbed_job: Run) -> None:
    _survived(LOAD, disturbed, undisturbed_job)


@pytest.mark.fault(
    row="22",
    point="a file of the newest checkpoint is truncated, then a rank is killed",
    witness="file written right before the signal; the end of the attempt names rank or process",
    bound="noticed in 15 s, interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_dies_when_the_newest_checkpoint_is_truncated(disturbed: Run, undisturbed_job: Run) -> None:
    _survived(TRUNCATED, disturbed, undisturbed_job)
    fired = disturbed.witness(_fault(TRUNCATED))["at"]
    restored = [r["step"] for r in disturbed.notes("restores") if r["at"] > fired]
    assert restored[0] == 4, "the checkpoint of step 8 was used"


def test_every_fault_ended_one_attempt(disturbed: Run) -> None:
    assert len(disturbed.ends) == len(FAULTS)
    for recovery in disturbed.recoveries:
        assert sum(recovery["parts"].values()) == pytest.approx(recovery["seconds"], abs=0.01)
