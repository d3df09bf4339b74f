"""Pieces of a log in an object store, where nothing can be appended: each has the records of some steps."""

import json
import re
from threading import RLock

from grpo_worker.common.files import write_text
from grpo_worker.common.store_path import StorePath, children, remove_file

_NAME = re.compile(r"(\d{8,})-(\d{8,})\.jsonl")


class LogPieces:
    """Objects ``00000001-00000010.jsonl`` in ``folder``, named by their first and last step.

    Of a job's controllers only the newest may write: check before. ``lock``: hold it from looking at
    ``last`` until the next piece is added.
    """

    def __init__(self, folder: StorePath) -> None:
        self.lock = RLock()
        self._folder = folder
        self._last: int | None = None

    @property
    def last(self) -> int:
        """The newest step whose records are there; -1: there are none."""
        if self._last is None:
            self._last = max((last for _, last in self._steps()), default=-1)
        return self._last

    def add(self, first: int, last: int, lines: bytes) -> None:
        """Add the records of the steps ``first`` to ``last``."""
        write_text(self._place(first, last), lines.decode())
        self._last = last

    def files(self) -> list[StorePath]:
        """Return the pieces in the order of their steps."""
        return [self._place(first, last) for first, last in self._steps()]

    def truncate(self, step: int) -> None:
        """Remove the records of all steps after ``step``."""
        with self.lock:
            self._last = None
            for first, last in self._steps():
                if last > step:
                    if first <= step:
                        self._keep(first, last, step)
                    remove_file(self._place(first, last))

    def _keep(self, first: int, last: int, step: int) -> None:
        """Write the records up to ``step`` of a piece that has later ones as well."""
        lines = self._place(first, last).read_text().splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        write_text(self._place(first, step), "".join(kept))

    def _steps(self) -> list[tuple[int, int]]:
        found = (_NAME.fullmatch(name) for name in sorted(children(self._folder)))
        return [(int(name[1]), int(name[2])) for name in found if name]

    def _place(self, first: int, last: int) -> StorePath:
        return self._folder / f"{first:08d}-{last:08d}.jsonl"
