"""Own time on a fake clock: which waits are subtracted, and which are not."""

import threading
from collections.abc import Callable

from grpo_worker.profiling.own_time import HostStopwatch, OwnTime, OwnTimeRecord
from support.clocks import FakeClock


def _record(clock: FakeClock) -> OwnTimeRecord:
    return OwnTimeRecord(lambda: HostStopwatch(clock.now))


def _wait(record: OwnTimeRecord, clock: FakeClock) -> Callable[[float], None]:
    return record.measured(lambda seconds: clock.sleep(seconds))


def test_waits_within_a_phase_are_no_own_time() -> None:
    clock = FakeClock()
    record = _record(clock)
    wait = _wait(record, clock)
    with record.phase("log_probs"):
        clock.sleep(2)
        wait(30)
        clock.sleep(1)
    wait(100)  # between two phases
    with record.phase("update"):
        wait(5)
        clock.sleep(4)
    assert record.take() == OwnTime(3.0, 4.0)
    assert record.take() == OwnTime(), "each piece of time is told once"


def test_a_wait_within_a_wait_counts_once() -> None:
    """A synchronous collective may wait for its own handle."""
    clock = FakeClock()
    record = _record(clock)
    inner = _wait(record, clock)

    def synchronous() -> None:
        clock.sleep(3)
        inner(7)

    with record.phase("update"):
        clock.sleep(1)
        record.measured(synchronous)()
    assert record.take().update == 1.0


def test_waits_of_other_threads_do_not_count() -> None:
    """Threads that write checkpoints have collectives, too."""
    clock = FakeClock()
    record = _record(clock)
    with record.phase("update"):
        writer = threading.Thread(target=_wait(record, clock), args=(50.0,))
        writer.start()
        writer.join()
    assert record.take().update == 50.0


def test_an_error_in_a_collective_passes_and_ends_its_wait() -> None:
    clock = FakeClock()
    record = _record(clock)

    def fail() -> None:
        clock.sleep(9)
        raise RuntimeError("the other end is gone")

    with record.phase("update"):
        try:
            record.measured(fail)()
        except RuntimeError:
            clock.sleep(2)
    assert record.take().update == 2.0
