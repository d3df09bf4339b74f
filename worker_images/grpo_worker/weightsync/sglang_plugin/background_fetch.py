"""Fetch of a version by a thread of an engine rank, while the rank generates."""

import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread

import torch

from grpo_worker.weightsync.sglang_plugin.wave_receiver import Received, WaveReceiver

_TURN_SECONDS = 0.00002  # of a thread that computes while others wait for Python's lock


class BackgroundFetch:
    """Receives ``version`` into a second copy of the model. It starts at once and ends by itself."""

    def __init__(self, receiver: WaveReceiver, version: str, patience: float, device: torch.device) -> None:
        """``receiver``: writes into the second copy. ``patience``: seconds that the rank waits for a wave."""
        self.version = version
        self.receiver = receiver
        self.result: Future[Received] = Future()
        Thread(target=self._run, args=(patience, device), daemon=True, name="fetch-weights").start()

    def problem(self) -> str:
        """Return the error of an ended fetch; "" without one, and while it runs."""
        if not self.result.done() or self.result.exception() is None:
            return ""
        return str(self.result.exception())

    def _run(self, patience: float, device: torch.device) -> None:
        try:
            with torch.no_grad(), _own_stream(device), _short_turns():
                self.result.set_result(self.receiver.fetch(patience))
        except Exception as error:  # noqa: BLE001 - also lack of memory; the engine serves on
            self.result.set_exception(error)


def _own_stream(device: torch.device) -> torch.cuda.StreamContext:
    """Keep the thread's kernels out of the streams in which the engine generates."""
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


@contextmanager
def _short_turns() -> Iterator[None]:
    """Shorten the turns of Python's threads.

    SGLang's scheduler polls without a pause, and each call of torch gives up Python's lock: at the usual
    5 ms a turn, the thousands of calls of a fetch would take tens of seconds.
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(_TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
