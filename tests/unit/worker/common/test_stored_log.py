"""The log in the store: whole lines, bounded files, and nobody who waits for a store."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_worker.common import stored_log
from grpo_worker.common.stored_log import WAITING_BYTES, StoredLog
from support.faults import until

PART = WAITING_BYTES
FAST = 0.01  # seconds between two writes
Make = Callable[..., StoredLog]


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    made = logging.getLogger("grpo_worker.test_stored_log")
    made.propagate = False
    made.setLevel(logging.INFO)
    yield made
    made.handlers.clear()
    logging.getLogger(stored_log.__name__).handlers.clear()


@pytest.fixture
def stored(logger: logging.Logger, tmp_path: Path) -> Iterator[Make]:
    """Make logs at ``logs/trainer-0.attempt-1.log``; their threads end with the test."""
    made: list[StoredLog] = []

    def make(pause: float = FAST, part_bytes: int = PART) -> StoredLog:
        made.append(StoredLog(tmp_path / "logs" / "trainer-0.attempt-1.log", part_bytes, pause=pause))
        logger.addHandler(made[-1])
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "logs" / "trainer-0.attempt-1.log"


def _messages(file: Path) -> list[str]:
    return _of(file.read_text())


def _of(text: str) -> list[str]:
    """Return the messages of lines."""
    return [line.rpartition(": ")[2] for line in text.splitlines()]


def test_lines_are_appended_in_order_also_to_those_of_an_earlier_process(
    stored: Make, logger: logging.Logger, file: Path
) -> None:
    file.parent.mkdir()
    file.write_text("an earlier one\n")
    log = stored()
    for number in range(1000):
        logger.info("%d", number)
    log.flush()
    assert _messages(file) == ["an earlier one", *map(str, range(1000))] and log.dropped == 0


def test_the_files_are_bounded_and_have_the_newest_lines(
    stored: Make, logger: logging.Logger, file: Path
) -> None:
    log = stored()
    for number in range(1000):
        logger.info("%d %s", number, 1000 * "x")
        if number % 50 == 0:
            log.flush()
    log.flush()
    older = file.with_name(file.name + ".1")
    assert {path.name for path in file.parent.iterdir()} == {file.name, older.name}
    assert max(file.stat().st_size, older.stat().st_size) <= PART
    numbers = [int(message.split()[0]) for message in _messages(older) + _messages(file)]
    assert numbers == list(range(numbers[0], 1000)) and log.dropped == 0, "no line is lost between both"


def test_the_store_gets_one_write_for_all_lines_of_a_pause(
    stored: Make, logger: logging.Logger, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writes, write = list[int](), StoredLog._write

    def counted(log: StoredLog, lines: bytes) -> int:
        writes.append(len(lines))
        return write(log, lines)

    monkeypatch.setattr(StoredLog, "_write", counted)
    log = stored(pause=1.0)
    logger.info("first")
    until(
        "the first line is there at once", lambda: file.exists() and _messages(file) == ["first"], 0.9, 0.01
    )
    for number in range(500):
        logger.info("%d", number)
    until("the others follow after the pause", lambda: len(_messages(file)) == 501, 20, 0.05)
    assert len([size for size in writes if size]) == 2 and log.dropped == 0


def test_a_store_that_hangs_delays_nobody_and_costs_counted_lines(
    stored: Make, logger: logging.Logger, file: Path
) -> None:
    file.parent.mkdir()
    os.mkfifo(file)  # opening it waits until somebody reads
    said = _warnings()
    log = stored()
    for number in range(500):  # the test would not end if one of them waited
        logger.info("%d %s", number, 1000 * "x")
    assert len(log._waiting) <= WAITING_BYTES and 0 < log.dropped < 500
    (warning,) = said
    assert str(file) in warning and "the store is too slow" in warning and "256 KiB" in warning
    dropped = log.dropped
    fifo = file.rename(file.with_suffix(".hung"))
    taken = fifo.read_bytes()  # the store answers again
    until("what waited is written", lambda: file.exists() and not log._waiting, 20, 0.05)
    logger.info("goes on")
    log.flush()
    text = taken.decode() + file.read_text()
    *first, gap, last = _of(text)
    assert [int(message.split()[0]) for message in first] == list(range(500 - dropped))
    assert (gap, last) == ("the store did not take them in time", "goes on")
    assert f": {dropped} lines are missing here: " in text
    assert len(said) == 1


def test_a_full_store_is_named_once_and_lines_wait_for_room(
    stored: Make, logger: logging.Logger, file: Path
) -> None:
    file.parent.mkdir()
    file.symlink_to("/dev/full")
    said = _warnings()
    log = stored()
    for number in range(20):
        logger.info("%d", number)
        time.sleep(2 * FAST)
    until("it is named", lambda: said, 10)
    assert len(said) == 1 and "No space left on device" in said[0]
    file.unlink()
    log.flush()
    assert _messages(file) == [*map(str, range(20))] and log.dropped == 0


def test_a_folder_that_was_removed_with_its_job_is_not_made_again(
    stored: Make, logger: logging.Logger, file: Path, tmp_path: Path
) -> None:
    said = _warnings()
    stored()
    tmp_path.rename(gone := tmp_path.with_name(f"{tmp_path.name}-deleted"))
    logger.info("late")
    until("the thread has tried", lambda: said, 10)
    assert not tmp_path.exists()
    gone.rename(tmp_path)


def test_a_wrong_message_raises_no_error(stored: Make, logger: logging.Logger, file: Path) -> None:
    log = stored()
    log.handle(logging.LogRecord(logger.name, logging.INFO, "", 0, "%d", ("no number",), None))
    log.handle(logging.LogRecord(logger.name, logging.INFO, "", 0, "\udc80 is no text", (), None))
    log.flush()
    assert _messages(file) == ["\\udc80 is no text"]


def test_a_part_has_room_for_what_may_wait(file: Path) -> None:
    with pytest.raises(ValueError, match="part_bytes=4096"):
        StoredLog(file, 4096)


_PROGRAM = """
import logging, sys
from pathlib import Path
from grpo_worker.common.log_lines import log_as
from grpo_worker.common.stored_log import StoredLog, WAITING_BYTES
log_as("controller")
logging.getLogger().addHandler(StoredLog(Path(sys.argv[1]), WAITING_BYTES))
for number in range(3):
    logging.warning("%d", number)
"""


def test_a_process_that_ends_brings_its_last_lines_to_the_store(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(file)], capture_output=True, check=True, timeout=60
    )
    assert _messages(file) == ["0", "1", "2"] and done.stderr == file.read_bytes()


def test_a_process_ends_in_seconds_although_the_store_hangs(file: Path) -> None:
    file.parent.mkdir()
    os.mkfifo(file)
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", _PROGRAM, str(file)], check=True, timeout=60)
    assert time.monotonic() - started < 20


def _warnings() -> list[str]:
    """Return a list that gets what a log in the store says in the other logs."""
    said: list[str] = []

    class Said(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    logging.getLogger(stored_log.__name__).addHandler(Said())
    return said
