"""Lines of the log in a file of the job's store, where they outlive the pod."""

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from grpo_worker.common.log_lines import LabelledLines

log = logging.getLogger(__name__)
PAUSE_SECONDS = 10.0  # after a write: with hundreds of ranks the store gets few requests
WAITING_BYTES = 256 << 10  # of lines that wait in memory for a store that is full, slow or away
_END_SECONDS = 3.0


class StoredLog(logging.Handler):
    """Appends lines to a file, in a thread: whoever logs never waits for the store.

    While the store does not take them, up to ``WAITING_BYTES`` of lines wait. Later ones are dropped; a line
    in the file says how many, and the other handlers get one warning. ``dropped``: lines of this process.
    The file has at most ``part_bytes``, and beside it lies ``FILE.1`` with what was before.
    """

    def __init__(
        self, file: Path, part_bytes: int, tidy: Callable[[], None] = lambda: None,
        pause: float = PAUSE_SECONDS,
    ) -> None:  # fmt: skip
        """``part_bytes``: at least ``WAITING_BYTES``. ``tidy``: called first; may raise OSError."""
        if part_bytes < WAITING_BYTES:
            raise ValueError(f"part_bytes={part_bytes}: a write of {WAITING_BYTES} bytes must fit")
        super().__init__()
        self.setFormatter(LabelledLines())
        self.dropped = 0
        self._file, self._part_bytes, self._tidy, self._pause = file, part_bytes, tidy, pause
        self._waiting = bytearray()
        self._missing = 0  # lines that were dropped since the last write
        self._hurried = self._ended = self._said = self._has_folder = False
        assert self.lock is not None
        # The handler's own lock: logging makes it usable again in a process that was forked meanwhile.
        self._changed = threading.Condition(self.lock)
        threading.Thread(target=self._write_all, name=f"log {file.name}", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line, or count it if too many wait."""
        try:
            line = f"{self.format(record)}\n".encode(errors="backslashreplace")
        except Exception:  # noqa: BLE001 - a wrong message stops nobody, as with other handlers
            self.handleError(record)
            return
        if not self._add(line):
            self.dropped += 1
            self._missing += 1
            self._say("the store is too slow")

    def flush(self) -> None:
        """Wait until all lines are in the file, for a few seconds at most."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._waiting, _END_SECONDS)

    def close(self) -> None:
        """End the thread after one more try to write what waits."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        super().close()

    def _add(self, line: bytes) -> bool:
        """Let a line wait; return False if there is no room for it."""
        if len(self._waiting) + len(line) > WAITING_BYTES:
            return False
        self._waiting += line
        self._changed.notify_all()
        return True

    def _write_all(self) -> None:
        with suppress(OSError):  # the next process tries again
            self._tidy()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                lines, self._hurried, ends = bytes(self._waiting), False, self._ended
            written = self._write(lines)
            with self._changed:
                del self._waiting[:written]
                if written and self._missing and self._add(self._gap()):
                    self._missing = 0
                self._changed.notify_all()
                if ends:
                    return
                self._changed.wait_for(lambda: self._hurried or self._ended, self._pause)

    def _write(self, lines: bytes) -> int:
        """Append lines; return how many bytes the store has taken."""
        if not lines:
            return 0
        try:
            if not self._has_folder:
                self._file.parent.mkdir(exist_ok=True)
                self._has_folder = True
            if self._size() + len(lines) > self._part_bytes:
                os.replace(self._file, f"{self._file}.1")
            with self._file.open("ab", buffering=0) as handle:
                return handle.write(lines)
        except OSError as error:
            self._say(str(error))
            return 0

    def _size(self) -> int:
        try:
            return self._file.stat().st_size
        except FileNotFoundError:
            return 0

    def _gap(self) -> bytes:
        """Return the line that stands in the place of lines that were dropped."""
        text = f"{self._missing} lines are missing here: the store did not take them in time"
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
        return f"{self.format(record)}\n".encode()

    def _say(self, problem: str) -> None:
        """Warn in the other logs, once in the life of this process."""
        if not self._said:
            self._said = True
            log.warning(
                "%s does not get the lines of this log now: %s. %d KiB of lines wait, later ones are dropped",
                self._file, problem, WAITING_BYTES >> 10,
            )  # fmt: skip
