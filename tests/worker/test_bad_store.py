"""Real ranks on a store of checkpoints that is full, does not answer, or takes no write: steps go on.

One job has all faults, one after the other; it is compared with one that has none.
"""

import pytest

from support.at_points import BETWEEN, FULL, READ_ONLY, STUCK, STUCK_STEPS, Fault
from support.disturbed_job import RECOVERY, Run, run_with, survived
from support.faulty_job import FULL_STEPS, READ_ONLY_SECONDS
from support.small_store import small_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # several starts of two ranks
NO_ROOM, STANDS, WRITE_PROTECTED = (
    Fault(FULL, 2, 0),
    [Fault(STUCK, 9, rank) for rank in (0, 1)],
    Fault(READ_ONLY, 14, 0),
)
DEAD = Fault(BETWEEN, 13, 1)
DELAY = 20.0  # seconds of a step, on two cores that run everything; an undisturbed one takes one or two


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("disturbed")
    (folder / "job").mkdir()
    with small_store(folder / "job" / "checkpoints", 64):
        return run_with(folder, [NO_ROOM, *STANDS, DEAD, WRITE_PROTECTED])


@pytest.mark.fault(
    row="21",
    point="the file system of the checkpoints is full, then does not answer the ranks, then is read-only",
    witness="no checkpoint became complete while the filler was there, and the next one did; files that "
    "waited; the error names the file system",
    bound="no step takes 20 s while it is full or slow; after it is writable, the next step ends in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, bitwise",
)
def test_a_store_that_is_full_slow_or_read_only(disturbed: Run, undisturbed_job: Run) -> None:
    disturbed.same_as(undisturbed_job)
    first = disturbed.ends[0]
    assert first["at"] > disturbed.witness(DEAD)["at"], "a full or slow store ended an attempt"
    full = disturbed.witness(NO_ROOM)["at"]
    (room,) = disturbed.notes("room")
    assert room["step"] == NO_ROOM.step + FULL_STEPS and room["at"] > full
    complete = disturbed.notes("complete")
    assert not [one for one in complete if full < one["at"] < room["at"]], "a checkpoint became complete"
    after = next(one for one in complete if one["at"] >= room["at"])
    assert after["step"] <= STANDS[0].step + STUCK_STEPS, "no checkpoint was saved although there was room"
    for fault in STANDS:
        (waited,) = disturbed.notes(f"waited-{fault.rank}")
        assert waited["step"] == fault.step + STUCK_STEPS
    assert disturbed.notes("waited-0")[0]["files"], "nothing waited for the store"
    assert max(disturbed.seconds[NO_ROOM.step - 1 : DEAD.step - 1]) < DELAY
    survived(DEAD, disturbed, undisturbed_job)
    protected = disturbed.witness(WRITE_PROTECTED)["at"]
    failed = [end for end in disturbed.ends if end["at"] > protected]
    assert failed and all("[Errno 30]" in end["message"] for end in failed)
    (writable,) = disturbed.notes("writable")
    assert writable["at"] - protected >= READ_ONLY_SECONDS
    last = next(note for note in reversed(disturbed.notes("restores")))
    assert last["at"] - writable["at"] < RECOVERY
