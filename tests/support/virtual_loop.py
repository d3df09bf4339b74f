"""Event loop on virtual time: when nothing can run, the time jumps to the next timer."""

import asyncio
import selectors
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Jumping(selectors.DefaultSelector):
    """Selector that advances its loop's time instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:  # wait for another thread
            return super().select(None)
        ready = super().select(0)
        if not ready:
            self.now += max(timeout, 0.0)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Loop whose ``time`` starts at 0 and costs nothing to wait for."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Run nothing while another thread gives the loop work, which then starts together."""
        holds, goes_on = threading.Event(), threading.Event()

        def hold() -> None:
            holds.set()
            goes_on.wait()

        self.call_soon_threadsafe(hold)
        holds.wait()
        try:
            yield
        finally:
            goes_on.set()

    def time(self) -> float:
        return self._jumping.now
