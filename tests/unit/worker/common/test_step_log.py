"""The log of steps: append-only, truncated by its index, written by a thread."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_worker.common import step_log
from grpo_worker.common.step_log import StepLog


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@given(
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    keep=st.integers(0, 9),
    torn=st.sampled_from(["", '{"step": 9, "ui', '{"step": 9}\n']),
)
def test_exactly_the_steps_after_a_checkpoint_are_forgotten(
    sizes: list[int], keep: int, torn: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("log") / "ledger.jsonl"
    log = StepLog(path)
    for step, size in enumerate(sizes, 1):
        log.append(step, [{"sample": number} for number in range(size)])
    log.flush()
    with path.open("a") as handle:
        handle.write(torn)  # the process died here
    again = StepLog(path)
    again.truncate(keep)
    expected = [step for step, size in enumerate(sizes, 1) for _ in range(size) if step <= keep]
    assert _steps(path) == expected
    again.append(keep + 1, [{}])
    again.flush()
    assert _steps(path) == [*expected, keep + 1]


def test_a_restart_reads_a_few_entries_of_a_long_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = StepLog(tmp_path / "ledger.jsonl")
    for step in range(1, 2001):
        log.append(step, [{"uid": str(step)}])
    log.flush()
    read: list[int] = []
    entry = step_log._entry

    def counted(index: Any, number: int) -> tuple[int, int, int]:
        read.append(number)
        return entry(index, number)

    monkeypatch.setattr(step_log, "_entry", counted)
    monkeypatch.setattr(json, "loads", pytest.fail)
    StepLog(tmp_path / "ledger.jsonl").truncate(1990)
    assert len(read) <= 12
    monkeypatch.undo()
    assert _steps(tmp_path / "ledger.jsonl") == list(range(1, 1991))


def test_a_log_without_an_index_gets_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 2}\n{"step": 3}\n{"st')
    StepLog(path).truncate(2)
    assert _steps(path) == [1, 2, 2]


def test_a_slow_store_delays_no_step_until_the_memory_for_records_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, write = threading.Event(), StepLog._write

    def slow(log: StepLog, step: int, lines: bytes) -> None:
        assert opened.wait(60)
        write(log, step, lines)

    monkeypatch.setattr(StepLog, "_write", slow)
    log = StepLog(tmp_path / "ledger.jsonl")
    for step in range(1, 101):
        log.append(step, [{}])
    assert _steps(tmp_path / "ledger.jsonl") == []
    monkeypatch.setattr(step_log, "WAITING_BYTES", log._waiting + 4)
    last = threading.Thread(target=log.append, args=(101, [{}]))
    last.start()
    last.join(0.2)
    assert last.is_alive(), "there is no room for its record"
    opened.set()
    last.join(60)
    log.flush()
    assert _steps(tmp_path / "ledger.jsonl") == list(range(1, 102)) and log._waiting == 0


def test_records_of_one_step_may_be_larger_than_the_memory_for_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_log, "WAITING_BYTES", 4)
    log = StepLog(tmp_path / "ledger.jsonl")
    for step in range(1, 4):
        log.append(step, [{}])
    log.flush()
    assert _steps(tmp_path / "ledger.jsonl") == [1, 2, 3]


def test_no_step_is_missing_after_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = StepLog._write

    def full(log: StepLog, step: int, lines: bytes) -> None:
        if step == 2:
            raise OSError(28, "No space left on device")
        write(log, step, lines)

    monkeypatch.setattr(StepLog, "_write", full)
    path = tmp_path / "ledger.jsonl"
    log = StepLog(path)
    log.append(1, [{}])
    log.append(2, [{}])
    log._queue.join()
    with pytest.raises(OSError, match="No space left"):
        log.append(3, [{}])
    with pytest.raises(OSError, match="No space left"):
        log.flush()
    assert _steps(path) == [1]
    monkeypatch.undo()
    log.truncate(1)
    log.append(2, [{}])
    log.flush()
    assert _steps(path) == [1, 2]


def test_nothing_is_written_once_another_process_has_the_log(tmp_path: Path) -> None:
    taken = False

    def check() -> None:
        if taken:
            raise RuntimeError("another controller has the log")

    log = StepLog(tmp_path / "ledger.jsonl", check)
    log.append(1, [{"n": 1}])
    log.flush()
    before, taken = (tmp_path / "ledger.jsonl").read_bytes(), True
    log.append(2, [{"n": 2}])
    with pytest.raises(RuntimeError, match="another controller has the log"):
        log.flush()
    with pytest.raises(RuntimeError, match="another controller has the log"):
        log.append(3, [{"n": 3}])
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
