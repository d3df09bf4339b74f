"""Trainers and engines without weights, which record the calls of a weight synchronizer.

mypy compares them with the protocols of the synchronizer, which the real classes satisfy too.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.controller.training.worker_group import GangError
from grpo_worker.rollout.engine_pool import Target
from grpo_worker.rollout.routing import EngineEntry

A, B = (
    EngineEntry(name, f"10.0.0.{n}", EngineState.SERVING, 1, ranks=n, bucket_bytes=64)
    for n, name in enumerate(("a", "b"), start=1)
)


class FakeTrainers:
    """Two ranks. ``events``: the calls in their order; the engines can append to the same list."""

    world, address = 2, "10.0.1.1"

    def __init__(self, events: list[str] | None = None) -> None:
        self.events: list[str] = [] if events is None else events
        self.notified: list[tuple[Any, ...]] = []
        self.problems: dict[str, str] = {}  # of rank 1 in a direct transfer, by link
        self.no_plan = ""  # why rank 0 cannot plan
        self.sent: list[list[str]] = []  # links of each version
        self.closed: list[str] = []  # links
        self.staging_may_end = threading.Event()
        self.dies = False  # while it stages a version

    def call(self, method: str, *args: Any) -> Any:
        self.events.append(method)
        if method == "start_rendezvous":
            return 1234
        if method == "exchange_layouts":
            return [self.no_plan, ""]
        if method == "open_links":
            return [[""] * len(args[0])] * 2
        if method == "send_weights":
            self.sent.append(list(args[0]))
            return [[""] * len(args[0]), [self.problems.get(link, "") for link in args[0]]]
        if method == "close_links":
            self.closed += args[0]
        if method == "empty_cache":  # bytes that are allocated and reserved afterwards
            return [(1 << 30, 2 << 30), (1 << 30, 3 << 30)]
        if method == "publish_weights":
            return ["digest-0", "digest-1"]
        return ["", ""]

    def begin(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """Start ``publish_weights``, whose results wait for ``staging_may_end``."""
        self.events.append(method)
        return self._staged

    def _staged(self) -> list[str]:
        assert self.staging_may_end.wait(10)
        if self.dies:
            raise GangError("publish_weights: a rank is gone", [1])
        return ["digest-0", "digest-1"]

    def sources(self) -> dict[int, str]:
        return {rank: f"http://10.0.1.{rank + 1}:9000" for rank in (0, 1)}

    def notify(self, method: str, *args: Any) -> None:
        self.events.append(method)
        self.notified.append((method, *args))


class FakeEngines:
    """Engines whose agents answer at once."""

    fp8, size = False, 2

    def __init__(self, *engines: EngineEntry, events: list[str] | None = None) -> None:
        self.events: list[str] = [] if events is None else events
        self.engines = list(engines)
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}
        self.serving = False  # whether enough engines serve a version after its direct transfer
        self.silent: dict[str, Future[dict[str, Any]]] = {}  # engines whose agents answer once they give up
        self.missing = ""  # why too few engines serve
        self.target: Target | None = None

    def hold(self) -> None:
        self.target = None

    def turn(self, parts: Sequence[str], timeout: float) -> None:
        self.events.append(f"hold {' '.join(parts) or 'nothing'}")

    def serves(self, version: int) -> bool:
        return self.serving

    def shortage(self, version: int) -> str:
        return self.missing

    def serve(self, target: Target, timeout: float) -> dict[str, float]:
        self.events.append(f"serve {target.version}")
        self.target = target
        return {"timing_s/update_weights_pull": 1.0}

    @contextmanager
    def reserved(self) -> Iterator[list[EngineEntry]]:
        yield self.engines

    def ask(self, engine: EngineEntry, route: str, timeout: float, **body: Any) -> "Future[dict[str, Any]]":
        self.asked.append((engine.name, route, body))
        future: Future[dict[str, Any]] = Future()
        if route == "give-up" and engine.name in self.silent:
            self.silent[engine.name].set_result({"error": "the engine does not answer"})
        elif engine.name in self.silent:
            self.silent[engine.name] = future
            return future
        answer = self.answers.get(engine.name, {"seconds": {"pause": float(engine.ranks)}})
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
        return future
