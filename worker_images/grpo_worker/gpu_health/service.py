"""Watches the node's GPUs beside an agent's own work, and serves what it finds."""

import logging
import threading
import time
from collections.abc import Callable

from prometheus_client import REGISTRY
from prometheus_client.registry import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from grpo_worker.gpu_health.metrics import GpuCollector
from grpo_worker.gpu_health.monitor import GpuMonitor

log = logging.getLogger(__name__)
_XID_PAUSE = 60.0  # before XIDs are watched again after NVML failed


class GpuWatch:
    """Reads the GPUs and their XIDs in two threads until ``stop``. ``seconds``: between two readings."""

    def __init__(self, seconds: float, registry: CollectorRegistry = REGISTRY) -> None:
        self.monitor = GpuMonitor(time.time)
        self._seconds, self._registry = seconds, registry
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads, or log why there is no GPU health: a pod without GPUs needs none."""
        try:
            from grpo_worker.gpu_health.nvml import Nvml  # needs nvidia-ml-py

            nvml = Nvml()
            self.monitor.take(nvml.read())
        except Exception as error:  # noqa: BLE001 - an agent does its work without NVML too
            log.info("the health of GPUs is not read: %r", error)
            return
        self._registry.register(GpuCollector(self.monitor))

        def watch_xids() -> None:
            nvml.watch_xids(self.monitor.take_xid, self._ended.is_set)

        for name, call, pause in (
            ("gpu-health", lambda: self.monitor.take(nvml.read()), self._seconds),
            ("gpu-xids", watch_xids, _XID_PAUSE),
        ):
            thread = threading.Thread(target=self._repeat, args=(call, pause), daemon=True, name=name)
            thread.start()
            self._threads.append(thread)
        log.info("the health of %d GPUs is read", len(self.monitor.readings))

    def _repeat(self, call: Callable[[], None], pause: float) -> None:
        while not self._ended.is_set():
            try:
                call()
            except Exception:  # the thread must go on; the next reading may succeed
                log.exception("reading the health of GPUs failed")
            self._ended.wait(pause)

    def stop(self) -> None:
        """End the threads."""
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def route(self) -> Route:
        """Return the route that the operator polls."""

        def answer(_: Request) -> Response:
            return JSONResponse(self.monitor.report().wire())

        return Route("/v1/gpus", answer)
