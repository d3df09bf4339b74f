"""Fetch of a version by a thread of an engine rank, while the rank generates."""

from concurrent.futures import Future
from threading import Thread

import torch

from grpo_worker.weightsync.sglang_plugin.side_thread import own_stream, short_turns
from grpo_worker.weightsync.sglang_plugin.wave_receiver import Received, WaveReceiver


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
            with torch.no_grad(), own_stream(device), short_turns():
                self.result.set_result(self.receiver.fetch(patience))
        except Exception as error:  # noqa: BLE001 - also lack of memory; the engine serves on
            self.result.set_exception(error)
