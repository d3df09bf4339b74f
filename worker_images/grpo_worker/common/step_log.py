"""Append-only log of JSON lines by step, with an index of where each step begins."""

import json
import os
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Queue
from threading import Condition, Thread
from typing import Any

from grpo_worker.common.files import sync_folder
from grpo_worker.common.log_pieces import LogPieces
from grpo_worker.common.store_path import StorePath, patiently

_ENTRY = struct.Struct("<qqq")  # step, first byte and end of its lines
# Records that may wait for a slow store, dozens of steps of 8,192 samples. Then the next step waits too,
# because memory is limited.
WAITING_BYTES = 64 << 20


class StepLog:
    """Log of records by step; a thread writes it, so that a slow store delays no step.

    At most ``WAITING_BYTES``, or one step's records, wait in memory.
    Beside ``PATH`` lies ``PATH.index`` with an entry of 24 bytes for each step. To forget the steps after a
    checkpoint, a few entries of the index are read, whatever the size of the log. Lines without an entry
    belong to a step that was being written when the process died.
    """

    def __init__(
        self, path: Path, check: Callable[[], None] = lambda: None, pieces: "StorePath | None" = None
    ) -> None:
        """Open or create the log. An index that is missing is made from the lines, which are read once.

        ``check``: called before each write; raises an error if another process has the log now. ``pieces``:
        folder of an object store that gets the records too, in a folder with the log's name; the log itself
        may then be lost with its pod.
        """
        self._check = check
        self._pieces = None if pieces is None else LogPieces(pieces / path.name)
        self._path, self._index = path, path.with_name(path.name + ".index")
        self._problem: Exception | None = None
        path.touch()
        if not self._index.exists():
            _write_index(self._index, path)
        sync_folder(path.parent)
        self._queue: Queue[tuple[int, bytes]] = Queue()
        self._waiting, self._room = 0, Condition()  # bytes in the queue
        Thread(target=self._write_all, name=f"log {path.name}", daemon=True).start()

    def append(self, step: int, records: Sequence[dict[str, Any]]) -> None:
        """Append the records of one step; they are on the store after ``flush``.

        Waits while the memory for records is full. Raises the error of an earlier write.
        """
        self._raise()
        lines = "".join(json.dumps({"step": step} | record) + "\n" for record in records).encode()
        with self._room:
            self._room.wait_for(lambda: not self._waiting or self._waiting + len(lines) <= WAITING_BYTES)
            self._waiting += len(lines)
        self._queue.put((step, lines))

    def flush(self) -> None:
        """Wait until everything is on the store. Raises the error of a write that failed."""
        self._queue.join()
        self._raise()
        with self._path.open("rb") as handle:
            os.fsync(handle.fileno())
        if self._pieces is not None:
            patiently(self._store_pieces, f"writing {self._path.name}")

    def settle(self) -> None:
        """Wait until everything that could be written is in the log, for a reader; see ``flush``."""
        self._queue.join()

    def truncate(self, step: int) -> None:
        """Remove the records of all steps after ``step``, and records that were not completely written."""
        if self._pieces is not None:
            self._check()
            self._pieces.truncate(step)
        self._queue.join()
        self._problem = None  # what could not be written is written again by the replay
        with self._index.open("r+b") as index:
            kept = _entries_up_to(index, step)
            end = _entry(index, kept - 1)[2] if kept else 0
            with self._path.open("r+b") as log:
                log.truncate(end)
            index.truncate(kept * _ENTRY.size)
            os.fsync(index.fileno())

    def _store_pieces(self) -> None:
        """Bring the steps that the object store lacks there."""
        assert self._pieces is not None
        with self._pieces.lock, self._index.open("rb") as index:
            count = os.fstat(index.fileno()).st_size // _ENTRY.size
            number = _entries_up_to(index, self._pieces.last)
            if number == count:
                return
            first, start, _ = _entry(index, number)
            last, _, end = _entry(index, count - 1)
            with self._path.open("rb") as log:
                log.seek(start)
                lines = log.read(end - start)
            self._check()
            self._pieces.add(first, last, lines)

    def _raise(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _write_all(self) -> None:
        while True:
            step, lines = self._queue.get()
            try:
                # After an error nothing is written until the log is truncated: no step may be missing.
                if self._problem is None:
                    self._check()
                    self._write(step, lines)
            except Exception as error:  # noqa: BLE001 - append and flush raise it
                self._problem = error
            finally:
                with self._room:
                    self._waiting -= len(lines)
                    self._room.notify_all()
                self._queue.task_done()

    def _write(self, step: int, lines: bytes) -> None:
        with self._path.open("ab") as log:
            start = log.tell()
            log.write(lines)
            log.flush()
            os.fsync(log.fileno())
        with self._index.open("ab") as index:
            index.write(_ENTRY.pack(step, start, start + len(lines)))
            index.flush()
            os.fsync(index.fileno())


def first_record_of_last_step(path: Path) -> dict[str, Any] | None:
    """Return the first record of the last step in the log at ``path``; None: there is none.

    For other processes than the one that writes. Raises OSError, or ValueError for a damaged log.
    """
    index = path.with_name(path.name + ".index")
    if not index.exists():
        return None
    with index.open("rb") as entries, path.open("rb") as log:
        number = os.fstat(entries.fileno()).st_size // _ENTRY.size - 1
        if number < 0:
            return None
        _, start, end = _entry(entries, number)
        log.seek(start)
        line = log.readline(end - start)
    record: dict[str, Any] | None = json.loads(line) if line else None
    return record


def records_from(path: Path, step: int, most: int, whole: bool = False) -> list[dict[str, Any]]:
    """Return the first record of each step of the log at ``path``, from ``step`` on if it has that one.

    ``most``: bytes that are read, more only if the first step has more. ``whole``: all records of each step.
    For other threads and processes than the one that writes: a log that is truncated meanwhile ends the list.
    """
    index = path.with_name(path.name + ".index")
    if not index.exists():
        return []
    found: list[dict[str, Any]] = []
    with suppress(struct.error, json.JSONDecodeError), index.open("rb") as entries, path.open("rb") as log:
        count = os.fstat(entries.fileno()).st_size // _ENTRY.size
        first = _entries_up_to(entries, step - 1)
        begin = _entry(entries, first)[1] if first < count else 0
        for number in range(first, count):
            _, start, end = _entry(entries, number)
            if found and end - begin > most:
                break
            log.seek(start)
            lines = log.read(end - start).splitlines() if whole else [log.readline(end - start)]
            found += [json.loads(line) for line in lines]
    return found


def _entry(index: Any, number: int) -> tuple[int, int, int]:
    index.seek(number * _ENTRY.size)
    step, start, end = _ENTRY.unpack(index.read(_ENTRY.size))
    return step, start, end


def _entries_up_to(index: Any, step: int) -> int:
    """Return the number of entries of steps up to ``step``, by bisection; steps only grow."""
    low, high = 0, os.fstat(index.fileno()).st_size // _ENTRY.size
    while low < high:
        middle = (low + high) // 2
        if _entry(index, middle)[0] <= step:
            low = middle + 1
        else:
            high = middle
    return low


def _write_index(index: Path, log: Path) -> None:
    """Write the index of a log that has none."""
    entries: list[tuple[int, int, int]] = []
    end = 0
    with log.open("rb") as lines:
        for line in lines:
            start, end = end, end + len(line)
            try:
                step = json.loads(line)["step"]
            except json.JSONDecodeError:
                break  # a line truncated by a crash belongs to a lost step
            first = entries.pop()[1] if entries and entries[-1][0] == step else start
            entries.append((step, first, end))
    temporary = index.with_suffix(".tmp")
    temporary.write_bytes(b"".join(_ENTRY.pack(*entry) for entry in entries))
    temporary.rename(index)
