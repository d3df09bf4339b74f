"""Own time on a fake clock: which waits are subtracted, and which are not."""

import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from grpo_worker.profiling.own_time import DeviceStopwatch, HostStopwatch, OwnTime, OwnTimeRecord
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
    assert record.take() == OwnTime(), "each piece of time is reported once"


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


class _Gpu:
    """The streams of a GPU: events take the time of the computing one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = FakeClock()  # of the stream
        self.stream = object()
        self.current = self.stream
        self.made = self.synchronized = 0
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "Event", self._event)

    def _event(self, enable_timing: bool) -> "_Event":
        assert enable_timing
        self.made += 1
        return _Event(self)


class _Event:
    def __init__(self, gpu: _Gpu) -> None:
        self._gpu = gpu
        self._time = 0.0

    def record(self, stream: object) -> None:
        assert stream is self._gpu.stream
        self._time = self._gpu.clock.now()

    def synchronize(self) -> None:
        self._gpu.synchronized += 1

    def elapsed_time(self, end: "_Event") -> float:
        return (end._time - self._time) * 1000


def test_on_a_gpu_waits_of_the_computing_stream_are_subtracted(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _Gpu(monkeypatch)
    record = OwnTimeRecord(DeviceStopwatch)
    wait = _wait(record, gpu.clock)
    with record.phase("update"):
        gpu.clock.sleep(2)
        wait(30)
        gpu.current = object()
        wait(5)  # on a stream beside it, which delays nothing by itself
        assert gpu.synchronized == 0, "the host does not wait within a phase"
    assert record.take() == OwnTime(0.0, 7.0)


def test_events_are_used_again_and_few_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = _Gpu(monkeypatch)
    record = OwnTimeRecord(DeviceStopwatch)
    wait = _wait(record, gpu.clock)
    for _ in range(2):
        with record.phase("update"):
            for _ in range(10_000):
                gpu.clock.sleep(1)
                wait(1)
        assert record.take().update == 10_000
    assert gpu.made < 9000


def test_torchs_collectives_report_to_the_record() -> None:
    """On one rank nothing waits for long, but each call and each handle is seen."""
    command = (
        "import torch, torch.distributed as dist\n"
        "from grpo_worker.profiling.own_time import OWN_TIME, HostStopwatch, measure_collectives\n"
        "seen = []\n"
        "OWN_TIME._make = lambda: type('W', (HostStopwatch,), {'add': lambda s, b, e, n: seen.append(n)})()\n"
        "measure_collectives(OWN_TIME)\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(1))\n"
        "assert not seen, 'outside of a phase'\n"
        "tensor = torch.ones(4)\n"
        "with OWN_TIME.phase('update'):\n"
        "    for call in (\n"
        "        lambda: dist.all_reduce(tensor),\n"
        "        lambda: dist.all_gather_into_tensor(torch.empty(4), tensor),\n"
        "        lambda: dist.reduce_scatter_tensor(torch.empty(4), tensor),\n"
        "        lambda: dist.all_to_all_single(torch.empty(4), tensor),\n"
        "        lambda: dist.broadcast(tensor, 0),\n"
        "        lambda: dist.barrier(),\n"
        "        lambda: dist.all_reduce(tensor, async_op=True).wait(),\n"
        "    ):\n"
        "        before = len(seen)\n"
        "        call()\n"
        "        assert seen[before:] and set(seen[before:]) == {-1}\n"
    )
    subprocess.run([sys.executable, "-c", command], check=True, timeout=120)
