"""Which objects are due when, with a clock of our own."""

from grpo_operator.handlers.workqueue import RESYNC_SECONDS, WorkQueue

A, B = ("GRPOJob", "ns", "a"), ("GRPOJob", "ns", "b")


def test_a_change_is_due_at_once_and_only_once() -> None:
    work = WorkQueue()
    work.mark(B, 1)
    work.mark(A, 1)
    work.mark(A, 2)
    assert work.take(2) == [A, B] and work.take(2) == []


def test_everything_is_looked_at_again_now_and_then() -> None:
    work = WorkQueue()
    work.mark(A, 0)
    work.take(0)
    work.done(A, True, 0)
    assert work.take(RESYNC_SECONDS - 1) == [] and work.take(RESYNC_SECONDS) == [A]


def test_a_change_during_the_work_is_not_lost() -> None:
    work = WorkQueue()
    work.mark(A, 0)
    work.take(0)
    work.mark(A, 0.5)
    work.done(A, True, 1)
    assert work.take(1) == [A]


def test_errors_wait_longer_each_time_whatever_happens_meanwhile() -> None:
    work, now, waits = WorkQueue(), 0.0, []
    work.mark(A, now)
    for _ in range(9):
        assert work.take(now) == [A]
        work.done(A, False, now)
        work.mark(A, now)
        begin = now
        while not work._due[A] <= now:
            now += 0.5
        waits.append(now - begin)
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30, 30]
    work.take(now)
    work.done(A, True, now)
    work.mark(A, now)
    assert work.take(now) == [A]


def test_deleted_objects_are_forgotten() -> None:
    work = WorkQueue()
    work.mark(A, 0)
    work.mark(B, 0)
    work.forget_all_but([B])
    assert work.take(1) == [B]
