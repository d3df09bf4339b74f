"""Which object is due when, and which is started next."""

from grpo_operator.handlers.workqueue import BURST_SECONDS, RESYNC_SECONDS, Key, Limits, WorkQueue

A, B = ("GRPOJob", "ns", "a"), ("GRPOJob", "ns", "b")


def _started(work: WorkQueue, now: float) -> list[Key]:
    """Release what is due, and start as many as have a place."""
    work.release(now)
    return list(iter(lambda: work.start(now), None))


def test_a_change_is_due_once_and_immediately() -> None:
    work = WorkQueue()
    work.add(B, 1)
    work.add(A, 1)
    work.add(A, 2)
    assert _started(work, 2) == [A, B] and _started(work, 2) == []


def test_every_object_is_requeued_periodically() -> None:
    work = WorkQueue()
    work.add(A, 0)
    assert _started(work, 0) == [A]
    work.done(A, True, 0)
    assert work.next_due() == RESYNC_SECONDS
    assert _started(work, RESYNC_SECONDS - 1) == [] and _started(work, RESYNC_SECONDS) == [A]


def test_an_object_never_runs_twice_at_a_time_and_a_change_meanwhile_is_not_lost() -> None:
    work = WorkQueue()
    work.add(A, 0)
    assert _started(work, 0) == [A]
    work.add(A, 0.5)
    assert _started(work, 100) == [] and work.next_due() is None
    work.done(A, True, 100)
    assert _started(work, 100 + BURST_SECONDS) == [A]


def test_a_burst_after_a_reconcile_ends_in_one_more() -> None:
    work = WorkQueue()
    work.add(A, 0)
    assert _started(work, 0) == [A]
    work.done(A, True, 1)
    for change in range(10):
        work.add(A, 1 + change / 100)
        assert _started(work, 1 + change / 100) == []
    assert _started(work, 1 + BURST_SECONDS) == [A]
    work.done(A, True, 2)
    assert _started(work, 2 + 2 * BURST_SECONDS) == []


def test_an_object_that_goes_on_changing_is_reconciled_less_often_until_it_is_quiet() -> None:
    work, now, starts = WorkQueue(), 0.0, []
    while now < 10:
        work.add(A, now)
        if _started(work, now):
            starts.append(now)
            work.done(A, True, now)
        now = round(now + 0.1, 1)
    assert starts[:4] == [0, 0.3, 0.9, 2.1] and 9 <= len(starts) <= 11
    now = 15.0
    work.add(A, now)
    assert _started(work, now) == [A]
    work.done(A, True, now)
    work.add(A, now)
    assert work.next_due() == now + BURST_SECONDS


def test_changes_of_an_object_that_waits_for_a_place_add_nothing() -> None:
    work = WorkQueue(Limits(total=1))
    work.add(A, 0)
    work.add(B, 0)
    assert _started(work, 0) == [A]
    for change in range(1, 5):
        work.add(B, change / 10)
        assert _started(work, change / 10) == []
    work.done(A, True, 1)
    assert _started(work, 1) == [B]
    work.done(B, True, 2)
    assert _started(work, 3) == []


def test_errors_back_off_even_when_changes_arrive() -> None:
    work, now, waits = WorkQueue(), 0.0, []
    work.add(A, now)
    for _ in range(9):
        assert _started(work, now) == [A]
        work.done(A, False, now)
        work.add(A, now)
        due = work.next_due()
        assert due is not None
        waits.append(due - now)
        now = due
    assert waits == [1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert _started(work, now) == [A]
    work.done(A, True, now)
    work.add(A, now + 1)
    assert _started(work, now + 1) == [A]


def test_deleted_objects_are_forgotten_even_while_they_wait() -> None:
    work = WorkQueue()
    work.add(A, 0)
    work.add(B, 0)
    work.release(0)
    work.retain([B])
    assert _started(work, 1) == [B]
    work.retain([])
    work.done(B, True, 1)
    work.retain([])
    assert work.next_due() is None


def _crowd(namespace: str, count: int) -> list[Key]:
    return [("GRPOJob", namespace, f"{namespace}-{number:03}") for number in range(count)]


def test_a_namespace_takes_only_its_share() -> None:
    work = WorkQueue(Limits(total=16, namespace=4))
    for key in _crowd("big", 100):
        work.add(key, 0)
    assert len(_started(work, 0)) == 4
    work.add(A, 1)
    assert _started(work, 1) == [A]


def test_namespaces_take_turns() -> None:
    work = WorkQueue(Limits(total=3, namespace=3))
    for key in [*_crowd("big", 50), *_crowd("small", 2), *_crowd("tiny", 1)]:
        work.add(key, 0)
    running = _started(work, 0)
    assert sorted(key[1] for key in running) == ["big", "small", "tiny"]
    order = []
    for second in range(6):
        work.done(running.pop(0), True, second)
        running += _started(work, second)
        order.append(running[-1][1])
    assert "small" in order[:2], "the second key of the small namespace waited behind the big one"


def test_reconciles_that_hang_leave_room_however_many_their_namespaces_are() -> None:
    limits = Limits(total=4, namespace=2, stalled_seconds=3)
    work = WorkQueue(limits)
    for number in range(10):
        for key in _crowd(f"slow-{number}", 5):
            work.add(key, 0)
    hung = [key for second in range(0, 60, 3) for key in _started(work, second)]
    assert len(hung) == 20, "each slow namespace has its share, and none more"
    work.add(A, 70)
    assert _started(work, 70) == [A]
    assert work.longest_running(70) == 70
