"""Calls of a gang of 256 stand-in ranks: progress has no limit, a hang is named soon, and by its rank."""

import errno
import pickle
from traceback import StackSummary
from typing import Any

import pytest
from ray.exceptions import RayTaskError
from torch.distributed.checkpoint.api import CheckpointException

from grpo_worker.common.store_problems import UnwritableStoreError, errno_of
from grpo_worker.controller.recovery.attempt_end import failure_of
from grpo_worker.controller.training.progress_watch import LONGEST_POLL
from grpo_worker.controller.training.worker_group import GangError, WorkerGroup
from support.clocks import FakeClock
from support.stand_in_ranks import Methods, StandInProcesses

WORLD, HANG, HOURS = 256, 240.0, 3600.0


def _gang(**script: Any) -> tuple[WorkerGroup, StandInProcesses, FakeClock]:
    clock = FakeClock()
    processes = StandInProcesses(clock, WORLD, **script)
    return WorkerGroup(Methods, processes, HANG, clock=clock), processes, clock


def _work(seconds: float) -> Any:
    return lambda _index, method: seconds if method == "work" else 0.0


def test_a_call_of_three_hours_that_moves_lives() -> None:
    # One rank alone reports something every 200 s, as when one file server is slow.
    gang, processes, clock = _gang(
        seconds=_work(3 * HOURS), count_at=lambda index, time: int(time // 200) if index == 17 else 5
    )
    began = clock.now()
    gang.call("work")
    assert clock.now() - began == 3 * HOURS
    assert "position" not in processes.asked, "stacks are asked for only to name a hang"
    assert processes.asked["progress"] <= WORLD * (3 * HOURS / LONGEST_POLL + 1)


def test_a_hang_is_named_within_a_minute_of_the_limit_and_by_its_rank() -> None:
    began = 1000.0

    def count_at(index: int, time: float) -> int:
        moved = min(int(time - began), 1000)  # everybody stops after 1000 s: rank 37 is one behind
        return 0 if index == 37 else moved

    gang, processes, clock = _gang(seconds=_work(3 * HOURS), count_at=count_at)
    with pytest.raises(GangError) as caught:
        gang.call("work")
    assert 1000 + HANG <= clock.now() - began <= 1000 + HANG + 60
    message = str(caught.value)
    assert message.startswith("work: no progress in 2")
    assert "rank 37 on trainer-4 (10.0.104.1) is stuck in loader.py:7 wait_for_something" in message
    assert "group 0 all: 0 collectives begun, others 1000" in message
    assert message.count("rank ") == 1
    assert not caught.value.outside and caught.value.lost == []
    assert caught.value.since is not None and 0 <= caught.value.since - began - 1000 <= LONGEST_POLL
    assert processes.asked["position"] == WORLD


def test_a_rank_whose_process_does_not_answer_is_named_although_others_move() -> None:
    gang, processes, clock = _gang(seconds=_work(3 * HOURS), count_at=lambda _index, time: int(time))
    began = clock.now()
    processes.frozen = {200}
    with pytest.raises(GangError, match=r"rank 200 on trainer-25 \(10.0.125.1\) does not respond") as caught:
        gang.call("work")
    assert HANG <= clock.now() - began <= HANG + 60
    assert caught.value.outside, "a frozen process is not the job's fault"


def test_ranks_that_all_wait_for_the_store_are_reported_together_and_are_not_the_jobs_fault() -> None:
    gang, _, _ = _gang(seconds=_work(3 * HOURS), work="bytes read", count_at=lambda _index, _time: 7)
    with pytest.raises(GangError) as caught:
        gang.call("work")
    text = "all ranks began the same collectives: rank 0 on trainer-0 (10.0.100.1), rank 1 on trainer-0"
    assert text in str(caught.value)
    assert "and 252 more ranks is stuck" in str(caught.value)
    assert "last progress: 7 bytes read" in str(caught.value)
    assert caught.value.outside and len(str(caught.value)) < 500


def test_a_rank_that_hangs_before_the_first_byte_of_a_store_is_not_the_jobs_fault() -> None:
    for reads in (True, False):
        gang, processes, _ = _gang(seconds=_work(HOURS), count_at=lambda index, _time: int(index != 37))
        processes.reads = reads
        with pytest.raises(GangError) as caught:
            gang.call("work")
        assert caught.value.outside is reads
        found = "waits for a store in loader.py:7" in str(caught.value)
        assert found is reads and "rank 37 on trainer-4" in str(caught.value)
        assert failure_of(caught.value).cause == ("infrastructure" if reads else "job")


def test_the_log_has_the_stack_of_a_rank_that_failed_by_itself(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stack = "ray::TrainerWorker.work()\n  File \"/x/actor.py\", line 3, in work\nKeyError: 'experts'"
    failed = RayTaskError("work", stack, KeyError("experts"))
    gang, _, _ = _gang(seconds=_work(1.0), errors={37: failed})
    with pytest.raises(GangError) as caught:
        gang.call("work")
    assert failure_of(caught.value).message == "work: KeyError: 'experts'"
    assert 'File "/x/actor.py", line 3, in work' in caplog.text


def _of_reads(error: Exception) -> CheckpointException:
    """Return torch's error of a checkpoint that two ranks cannot read."""
    return CheckpointException("load", {rank: (error, StackSummary()) for rank in range(2)})


STALE, MISSING = OSError(errno.ESTALE, "Stale file handle"), FileNotFoundError(errno.ENOENT, "no such file")


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.fault(
    row="nfs-stale",
    point="a rank's work answers ESTALE, EIO and others",
    witness="the message names the store",
    partial="stand-in ranks; no recovery",
)
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RayTaskError("work", "Traceback", STALE), "a store does not answer"),
        (RayTaskError("work", "Traceback", _of_reads(OSError(errno.EIO, "no"))), "a store does not answer"),
        (RayTaskError("work", "Traceback", FULL), "checkpoint.store.pvc=runs is full: free space"),
        (RayTaskError("work", "Traceback", _of_reads(FULL)), "checkpoint.store.pvc=runs is full: free space"),
        (
            RayTaskError("work", "Traceback", UnwritableStoreError("rank 3 cannot write", errno.EDQUOT)),
            "checkpoint.store.pvc=runs has no quota left: free space in it or raise the quota",
        ),
        (
            RayTaskError("work", "Traceback", OSError(errno.EROFS, "Read-only file system")),
            "checkpoint.store.pvc=runs is mounted read-only: make it writable",
        ),
        (RayTaskError("work", "Traceback", MISSING), ""),
        (RayTaskError("work", "Traceback", UnwritableStoreError("a thread died")), ""),
        (RayTaskError("work", "Traceback", ValueError("shape (3,), expected (4,)")), ""),
    ],
    ids=["stale", "of torch's reads", "full", "of torch's writes", "quota", "read-only", "missing", "died",
         "wrong"],
)  # fmt: skip
@pytest.mark.parametrize("beside", [False, True])
def test_a_store_that_fails_a_rank_is_named_and_is_not_the_jobs_fault(
    error: Exception, said: str, beside: bool
) -> None:
    gang, processes, _ = _gang()
    processes.errors = {5: error}
    with pytest.raises(GangError) as caught:
        gang.beside("work")() if beside else gang.call("work")
    failure = failure_of(caught.value, "checkpoint.store.pvc=runs")
    assert failure.cause == ("infrastructure" if said else "job") and not failure.final
    assert f"({said}" in failure.message if said else "store" not in failure.message


def test_the_systems_number_is_found_in_errors_of_libraries_and_survives_pickling() -> None:
    rust = RuntimeError("I/O error: No space left on device (os error 28)")
    assert errno_of(rust) == errno.ENOSPC and errno_of(ValueError("step 28")) == 0
    masked = RuntimeError("unexpected pos 704 vs 598")  # as torch's when it closes the file
    masked.__context__ = FULL
    assert errno_of(masked) == errno.ENOSPC
    error = pickle.loads(pickle.dumps(UnwritableStoreError("not exported", errno_of(rust))))
    assert (str(error), error.errno) == ("not exported", errno.ENOSPC)


def test_a_wait_for_others_than_the_gang_has_its_own_deadline() -> None:
    gang, processes, clock = _gang(seconds=_work(HANG + 100), count_at=lambda _index, _time: 7)
    processes.allowance = 120.0
    began = clock.now()
    gang.call("work")
    assert clock.now() - began == HANG + 100


def test_ranks_that_end_one_after_the_other_are_progress() -> None:
    gang, _, clock = _gang(seconds=lambda index, method: 100.0 * index if method == "work" else 0.0)
    began = clock.now()
    gang.call("work")
    assert clock.now() - began == 100.0 * (WORLD - 1)


def test_a_dead_rank_ends_the_call_at_once() -> None:
    gang, processes, clock = _gang(seconds=_work(HOURS), count_at=lambda _index, time: int(time))
    processes.die(9)
    began = clock.now()
    with pytest.raises(GangError) as caught:
        gang.call("work")
    assert caught.value.lost == [9] and caught.value.outside
    assert clock.now() == began


def test_a_death_between_two_calls_is_named() -> None:
    gang, processes, _ = _gang()
    assert not gang.died.done()
    processes.die(255, 8)
    assert gang.died.done()
    assert str(gang.death()) == (
        "the processes of rank 8 on trainer-1 (10.0.101.1), rank 255 on trainer-31 (10.0.131.1) have ended"
    )


def test_ranks_start_with_one_copy_of_their_configuration() -> None:
    gang, processes, _ = _gang()
    gang.start({"spec": {}})
    assert processes.stored == 1
    assert [info.rank for info in gang.ranks] == list(range(WORLD))


def test_processes_that_never_start_are_an_error_too() -> None:
    clock = FakeClock()
    processes = StandInProcesses(clock, 4, frozen={2})
    with pytest.raises(GangError, match=r"start of processes: no progress .* rank 2 does not respond"):
        WorkerGroup(Methods, processes, HANG, clock=clock)


def test_the_pod_of_the_process_that_is_about_to_end_is_known_between_two_calls() -> None:
    group, processes, _ = _gang()
    assert not group.leaving.done()
    processes.leaving.set_result(9)
    assert group.leaving.result(0).pod == "trainer-1"
