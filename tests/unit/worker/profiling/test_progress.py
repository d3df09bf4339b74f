"""Progress of one process: what counts, and files whose bytes count."""

import threading
import time
from pathlib import Path

import pytest

from grpo_worker.controller.training.progress_watch import ProgressWatch, Standstill
from grpo_worker.profiling import counted_file
from grpo_worker.profiling.counted_file import growing
from grpo_worker.profiling.progress import BACKGROUND, WRITTEN, Progress, ProgressRecord


def test_every_piece_of_work_makes_the_count_grow() -> None:
    record = ProgressRecord()
    record.add("forward passes")
    record.add("bytes read", 100)
    assert record.get() == Progress(101, "bytes read")
    assert record.amounts() == {"forward passes": 1, "bytes read": 100}


def test_threads_lose_no_count() -> None:
    record = ProgressRecord()

    def work() -> None:
        for _ in range(2000):
            record.add("pieces")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert record.get().count == 8000


def test_a_wait_for_others_is_announced_and_its_end_is_progress() -> None:
    record = ProgressRecord()
    with record.waiting(60):
        assert record.get().allowance == 60
    assert record.get().allowance == 0 and record.get().count == 1


def test_the_growth_of_a_file_counts_while_one_call_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counted_file, "_LOOK_SECONDS", 0.01)
    path, before = tmp_path / "model.safetensors", BACKGROUND.amounts().get(WRITTEN, 0)
    with growing(path), path.open("wb") as file:
        file.write(bytes(1000))
        file.flush()
        deadline = time.monotonic() + 10
        while BACKGROUND.amounts().get(WRITTEN, 0) - before < 1000:
            assert time.monotonic() < deadline, "no growth was counted during the write"
            time.sleep(0.01)
        file.write(bytes(500))
    assert BACKGROUND.amounts()[WRITTEN] - before == 1500


def test_a_rank_that_nobody_asked_is_not_silent() -> None:
    watch = ProgressWatch(100, 2, now=0)
    for now in range(10, 200, 10):
        watch.moved(now)  # the call ends on other ranks, so nobody is asked
    assert watch.observe([Progress(1), None], 200) is None
    assert watch.observe([Progress(2), None], 280) is None
    assert watch.observe([Progress(3), None], 295) == Standstill(105, (1,))


def test_the_limit_counts_from_the_last_progress_of_any_rank() -> None:
    watch = ProgressWatch(100, 2, now=0)
    assert watch.observe([Progress(1), Progress(1)], 90) is None
    assert watch.observe([Progress(1), Progress(2)], 180) is None
    assert watch.observe([Progress(1), Progress(2)], 279) is None
    assert watch.observe([Progress(1), Progress(2, allowance=60)], 281) is None
    assert watch.observe([Progress(1), Progress(2)], 281) == Standstill(101)
