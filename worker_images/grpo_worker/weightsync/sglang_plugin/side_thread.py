"""Surroundings of a thread that moves weights while an engine rank generates."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_TURN_SECONDS = 0.00002  # of a thread that computes while others wait for Python's lock
_lock = threading.Lock()
_usual: list[float] = []  # one entry for each thread that needs short turns


def own_stream(device: torch.device) -> torch.cuda.StreamContext:
    """Keep the thread's kernels out of the streams in which the engine generates."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


@contextmanager
def short_turns() -> Iterator[None]:
    """Shorten the turns of Python's threads, for as long as any thread needs it.

    SGLang's scheduler polls without a pause, and each call of torch or of a socket gives up Python's lock: at
    the usual 5 ms a turn, the thousands of calls of a fetch would take tens of seconds. A thread that waits
    for bytes takes no turns, so its connection may stay open in the context.
    """
    with _lock:
        _usual.append(_usual[0] if _usual else sys.getswitchinterval())
        sys.setswitchinterval(_TURN_SECONDS)
    try:
        yield
    finally:
        with _lock:
            usual = _usual.pop()
            if not _usual:
                sys.setswitchinterval(usual)
