"""Another controller is noticed beside the steps; a store that is slow or away delays none."""

import threading
import time
from pathlib import Path

import pytest

from grpo_worker.checkpointing.attempts import SupersededError
from grpo_worker.controller.recovery.record_watch import RecordWatch
from grpo_worker.controller.recovery.run_record import RunRecord


@pytest.fixture
def record(tmp_path: Path) -> RunRecord:
    found = RunRecord.load(tmp_path / "run.json")
    found.begin_attempt()
    return found


def _read_twice(watch: RecordWatch) -> None:
    """Do as two steps do, between which a read ends."""
    watch.check()
    _wait(watch)
    watch.check()
    _wait(watch)


def _wait(watch: RecordWatch) -> None:
    assert watch._reading is not None
    watch._reading.exception(30)


def test_a_newer_attempt_is_noticed_by_the_step_after_the_read(record: RunRecord) -> None:
    watch = RecordWatch(record)
    _read_twice(watch)
    RunRecord.load(record.path).begin_attempt()
    watch.check()  # the result of a read before
    _wait(watch)
    with pytest.raises(SupersededError, match="attempt 2 has begun"):
        watch.check()


def test_a_record_that_cannot_be_read_for_a_moment_costs_no_restart(record: RunRecord) -> None:
    watch, text = RecordWatch(record), record.path.read_text()
    record.path.write_text("{")
    watch.check()
    _wait(watch)
    record.path.write_text(text)
    _read_twice(watch)
    assert record.unread == 1


@pytest.mark.fault(
    row="nfs-stale",
    point="a read of the run's record answers EIO",
    witness="unread records counted",
    bound="the next look",
    partial="one file, no job",
)
def test_a_store_that_is_away_for_a_moment_costs_no_restart(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(self: Path) -> str:
        raise OSError(5, "Input/output error")

    watch = RecordWatch(record)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", away)
        watch.check()
        _wait(watch)
    _read_twice(watch)
    assert record.unread == 1


def test_a_slow_store_is_waited_for_by_no_step_and_asked_once(
    record: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, reads, text = threading.Event(), [], record.path.read_text()

    def slow(self: Path) -> str:
        reads.append(self)
        assert opened.wait(60)
        return text

    monkeypatch.setattr(Path, "read_text", slow)
    watch, started = RecordWatch(record), time.monotonic()
    for _ in range(100):
        watch.check()
    assert time.monotonic() - started < 30 and len(reads) <= 1
    opened.set()
    _wait(watch)
    watch.check()
    _wait(watch)
    assert len(reads) == 2
