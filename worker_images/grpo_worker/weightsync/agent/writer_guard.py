"""Writer guard: only the bound job, and of it only the newest attempt, may change the engine's weights.

A job's attempt is one start of its controller. Without the check, a controller whose node was cut off could
overwrite the weights of its successor.
"""

import json
import logging
from pathlib import Path

from grpo_worker.common.auth import serve
from grpo_worker.common.files import write_text
from grpo_worker.common.log_lines import LABELS

log = logging.getLogger(__name__)


class WriterError(RuntimeError):
    """The job is not bound to this engine, or a newer attempt of it has written."""


class WriterGuard:
    """The job bound to one engine and its newest attempt. ``writer`` is None until a job is bound.

    ``file``: keeps both as long as the pod lives, also when this process restarts.
    """

    def __init__(self, writer: str | None = None, file: Path | None = None) -> None:
        """``writer``: the only job that may ever write; None: the operator binds one."""
        self.writer = writer
        self.attempt = 0
        self._newest = (0, 0)  # attempt and version of the newest weights of the job that are known to exist
        self._file = file
        self._shared = writer is None
        self._remember()

    def bind(self, writer: str) -> bool:
        """Bind a job, and return whether it is another one than before."""
        if writer == self.writer:
            return False
        self._accept(writer, 0)
        self._newest = (0, 0)
        return True

    def adopt(self, writer: str | None, attempt: int) -> None:
        """Take over the job whose weights the engine got from a peer, unless a job is bound already."""
        if self.writer is None:
            self._accept(writer, attempt)

    def note(self, attempt: int, version: int) -> None:
        """Note that an attempt of the bound job has ``version``. A newer attempt may be at an older one."""
        self._newest = max(self._newest, (attempt, version))

    def outdated(self, attempt: int, version: int) -> bool:
        """Return whether the job is known to have newer weights than ``version`` of ``attempt``."""
        return (attempt, version) < self._newest

    def check(self, writer: str, attempt: int) -> None:
        """Raise WriterError unless this attempt of the job may write."""
        if writer != self.writer:
            bound = f"to {self.writer}" if self.writer else "to no job yet"
            raise WriterError(f"job {writer} may not write: this engine is bound {bound}")
        if attempt < self.attempt:
            raise WriterError(f"attempt {attempt} of {writer} may not write: attempt {self.attempt} does")

    def admit(self, writer: str, attempt: int) -> None:
        """Check an attempt, and remember it as the newest one. Raises WriterError."""
        self.check(writer, attempt)
        if attempt != self.attempt:
            self._accept(writer, attempt)

    def _accept(self, writer: str | None, attempt: int) -> None:
        self._set(writer, attempt)
        if self._file is None:
            return
        try:
            write_text(self._file, json.dumps({"writer": writer, "attempt": attempt}))
        except OSError as error:  # the check holds until this process restarts
            log.warning("%s cannot be written: %s", self._file, error)

    def _remember(self) -> None:
        """Continue with what the process before this one has accepted."""
        if self._file is None or not self._file.is_file():
            return
        try:
            saved = json.loads(self._file.read_text())
            writer, attempt = saved["writer"], int(saved["attempt"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be read: %s", self._file, error)
            return
        if self.writer in (None, writer):
            self._set(writer, attempt)

    def _set(self, writer: str | None, attempt: int) -> None:
        self.writer, self.attempt = writer, attempt
        LABELS.attempt = attempt or None
        if self._shared:
            serve(writer)
