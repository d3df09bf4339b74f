"""The work queue with a fake clock: when which object is due."""

from grpo_operator.handlers.workqueue import RESYNC_SECONDS, WorkQueue

A, B = ("GRPOJob", "ns", "a"), ("GRPOJob", "ns", "b")


def test_a_change_is_due_once_and_immediately() -> None:
    work = WorkQueue()
    work.add(B, 1)
    work.add(A, 1)
    work.add(A, 2)
    assert work.pop_due(2) == [A, B] and work.pop_due(2) == []


def test_every_object_is_requeued_periodically() -> None:
    work = WorkQueue()
    work.add(A, 0)
    work.pop_due(0)
    work.done(A, True, 0)
    assert work.pop_due(RESYNC_SECONDS - 1) == [] and work.pop_due(RESYNC_SECONDS) == [A]


def test_a_change_during_the_work_is_not_lost() -> None:
    work = WorkQueue()
    work.add(A, 0)
    work.pop_due(0)
    work.add(A, 0.5)
    work.done(A, True, 1)
    assert work.pop_due(1) == [A]


def test_errors_back_off_even_when_changes_arrive() -> None:
    work, now, waits = WorkQueue(), 0.0, []
    work.add(A, now)
    for _ in range(9):
        assert work.pop_due(now) == [A]
        work.done(A, False, now)
        work.add(A, now)
        begin = now
        while not work._due[A] <= now:
            now += 0.5
        waits.append(now - begin)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30, 30]
    work.pop_due(now)
    work.done(A, True, now)
    work.add(A, now)
    assert work.pop_due(now) == [A]


def test_deleted_objects_are_forgotten() -> None:
    work = WorkQueue()
    work.add(A, 0)
    work.add(B, 0)
    work.retain([B])
    assert work.pop_due(1) == [B]
