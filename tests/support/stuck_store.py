"""A store that answers nothing for a while, for one process."""

import os
import sys
import threading
from pathlib import Path
from typing import Any

_PATHS = {
    "open": 1, "os.mkdir": 1, "os.rename": 2, "os.remove": 1, "os.rmdir": 1, "os.listdir": 1, "os.scandir": 1,
    "os.truncate": 1, "shutil.rmtree": 1,
}  # fmt: skip


class StuckStore:
    """Files below ``folder``, which are out of reach from ``begin`` until ``end``.

    Threads that open, create, rename, list or remove one wait. The main thread, which trains, must not touch
    them meanwhile: it gets an AssertionError. Files that compiled code opens are not noticed. ``waited``:
    names of the files that a thread waited for.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._reachable = threading.Event()
        self._reachable.set()
        self.waited: set[str] = set()
        sys.addaudithook(self._on_event)  # there is no way to remove one
        for name in ("stat", "lstat"):
            setattr(os, name, self._watching(getattr(os, name)))

    def begin(self) -> None:
        self._reachable.clear()

    def end(self) -> None:
        self._reachable.set()

    def _on_event(self, event: str, args: tuple[Any, ...]) -> None:
        for path in args[: _PATHS.get(event, 0)]:
            self._reach(path)

    def _watching(self, original: Any) -> Any:
        def watched(path: Any, *args: Any, **kwargs: Any) -> Any:
            self._reach(path)
            return original(path, *args, **kwargs)

        return watched

    def _reach(self, path: Any) -> None:
        if self._reachable.is_set() or not isinstance(path, str | os.PathLike):
            return
        name = str(path)
        if not name.startswith(self._folder):
            return
        assert threading.current_thread() is not threading.main_thread(), f"a step waits for {name}"
        self.waited.add(Path(name).name)
        assert self._reachable.wait(120), f"the store is stuck longer than the test: {name}"
