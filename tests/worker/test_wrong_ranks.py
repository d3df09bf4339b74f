"""Real ranks that hang, compute wrong gradients, or get too little time.

One job has all faults, one after the other; it is compared with one that has none.
"""

import pytest

from support.at_points import COLLECTIVE, EXPONENT, FROZEN, HANG, LAST_BIT, LOCK, NAN, PAUSES, Fault
from support.disturbed_job import HANG_DETECTION, Run, run_with, survived
from support.faulty_job import CHECKED_STEPS, PAUSED_STEPS, STRAGGLERS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # nine starts of two ranks, and four hangs
HANGING = [Fault(LOCK, 2, 1), Fault(COLLECTIVE, 5, 0), Fault(HANG, 14, 0), Fault(FROZEN, 15, 1)]
NOT_A_NUMBER, FLIPPED = Fault(NAN, 6, 1), Fault(EXPONENT, 7, 0)
WRONG = Fault(LAST_BIT, CHECKED_STEPS, 1)
SLOW = Fault(PAUSES, 9, 1)


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    faults = [*HANGING, NOT_A_NUMBER, FLIPPED, WRONG, SLOW]
    return run_with(tmp_path_factory.mktemp("disturbed"), faults)


@pytest.mark.fault(
    row="4",
    point="a rank never returns in the forward pass, is stopped there, or runs C code that keeps the lock of "
    "Python; a rank never joins the collective of the gradients' norm",
    witness="files written right before; the ends of the attempts name the rank, and its line or group",
    bound="noticed in 105 s each (hangSeconds 60), interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_ranks_that_hang(disturbed: Run, undisturbed_job: Run) -> None:
    message = {f.point: survived(f, disturbed, undisturbed_job, HANG_DETECTION) for f in HANGING}
    assert "read_a_lost_disk" in message[HANG], "its line is not named"
    assert "does not respond" in message[FROZEN]
    assert "does not respond" in message[LOCK], "a thread of it answers without the lock"
    assert "look_for_something" in message[COLLECTIVE] and "collectives begun, others" in message[COLLECTIVE]


@pytest.mark.fault(
    row="24",
    point="an element of the last layer's gradient is NaN on one rank; in another step the first bit of its "
    "exponent flips on the other rank",
    witness="files written in the backward pass; the ends of the attempts name the rank",
    bound="noticed in 15 s, before the weights change; interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_gradients_that_are_no_numbers_or_too_large(disturbed: Run, undisturbed_job: Run) -> None:
    assert "found NaN in local grad norm" in survived(NOT_A_NUMBER, disturbed, undisturbed_job)
    assert "found Inf in local grad norm" in survived(FLIPPED, disturbed, undisturbed_job)


@pytest.mark.fault(
    row="wrong-gradient",
    point="the last bit of an element of the last layer's gradient flips on one rank, in a step that "
    "trainer.gradientCheck checks",
    witness="file written in the backward pass; the end of the attempt names the rank",
    bound="noticed in 15 s, before the weights change; interrupted step finished in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_gradient_that_is_wrong_and_finite(disturbed: Run, undisturbed_job: Run) -> None:
    message = survived(WRONG, disturbed, undisturbed_job)
    assert f"trainer ranks [{WRONG.rank}] computed the gradients of the same samples twice" in message


@pytest.mark.fault(
    row="9",
    point="a rank is stopped for four fifths of the time in four steps",
    witness="pauses counted in each of the steps",
    bound="named after 3 slow steps, and no longer after the first one that is not slow",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_rank_that_is_paused_is_named_and_costs_time_alone(disturbed: Run, undisturbed_job: Run) -> None:
    pauses = {note["step"]: note["seen"] for note in disturbed.notes("pauses")}
    slow = range(SLOW.step, SLOW.step + PAUSED_STEPS)
    assert sorted(pauses) == list(slow) and min(pauses.values()) >= 2
    named = {note["step"]: note["ranks"] for note in disturbed.notes("stragglers")}
    first = SLOW.step + int(STRAGGLERS["steps"]) - 1
    assert [step for step, ranks in named.items() if SLOW.rank in ranks] == list(range(first, slow.stop))
    steps = range(SLOW.step, SLOW.step + PAUSED_STEPS)
    assert not [end for end in disturbed.ends if end["step"] in steps], "it ends no attempt"
    disturbed.same_as(undisturbed_job)


def test_every_other_fault_ended_one_attempt(disturbed: Run) -> None:
    assert len(disturbed.ends) == len(HANGING) + 3
