"""A clock that is wrong by the seconds in the file GRPO_TEST_CLOCK; Python imports this as it starts.

Only the wall clock of Python is wrong, but not for ``datetime``. A library that shifts the clock of the C
library would lengthen its waits, too, which a wrong clock does not.
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

_FILE, _LOOK_SECONDS = os.environ.get("GRPO_TEST_CLOCK"), 1.0
_right, _right_ns = time.time, time.time_ns


def _offset() -> Callable[[], float]:
    known, until = 0.0, 0.0

    def offset() -> float:
        nonlocal known, until
        if time.monotonic() >= until:
            until = time.monotonic() + _LOOK_SECONDS
            try:
                known = float(Path(str(_FILE)).read_text() or 0)
            except OSError:
                known = 0.0
        return known

    return offset


if _FILE:
    _ahead = _offset()
    time.time = lambda: _right() + _ahead()
    time.time_ns = lambda: _right_ns() + int(_ahead() * 1e9)
