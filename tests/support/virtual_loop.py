"""Event loop on virtual time: when nothing can run, the time jumps to the next timer."""

import asyncio
import selectors
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Jumping(selectors.DefaultSelector):
    """Selector that advances its loop's time instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.held = False

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or (self.held and timeout > 0):  # wait for another thread
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
        """Stop the time while another thread gives the loop work."""
        self._jumping.held = True
        try:
            yield
        finally:
            self._jumping.held = False
            self.call_soon_threadsafe(lambda: None)

    def time(self) -> float:
        return self._jumping.now
