"""Trainers and engines of a link without weights: they write down what they are asked for."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.controller.training.worker_group import GangError
from grpo_worker.quantization.fp8 import Part
from grpo_worker.rollout.engine_pool import Target
from grpo_worker.rollout.routing import EngineEntry
from grpo_worker.weightsync.protocol.manifest import layout

A, B = (
    EngineEntry(name, f"10.0.0.{n}", EngineState.SERVING, 1, ranks=n, bucket_bytes=64)
    for n, name in enumerate(("a", "b"), start=1)
)


PARTS: list[list[Part]] = [[(f"w{rank}", (4,), 0, 0, torch.zeros(4))] for rank in (0, 1)]


class Gang:
    """Two ranks that write down what they are asked for."""

    world, address = 2, "10.0.1.1"

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.told: list[tuple[Any, ...]] = []
        self.problem = ""
        self.let_go = threading.Event()
        self.dies = False

    def call(self, method: str, *args: Any) -> Any:
        self.calls.append(method)
        if method == "listen":
            return 1234
        if method == "weight_layout":
            return [layout(rank, 2, PARTS[rank]).to_json() for rank in (0, 1)]
        return ["", self.problem if method == "send_weights" else ""]

    def begin(self, method: str, *args: Any) -> Callable[[], Any]:
        """The answer of ``publish_weights`` waits until it is let go."""
        self.calls.append(method)
        return self._copied

    def _copied(self) -> list[str]:
        assert self.let_go.wait(10)
        if self.dies:
            raise GangError("publish_weights: a rank is gone", [1])
        return ["digest-0", "digest-1"]

    def sources(self) -> dict[int, str]:
        return {rank: f"http://10.0.1.{rank + 1}:9000" for rank in (0, 1)}

    def tell(self, method: str, *args: Any) -> None:
        self.calls.append(method)
        self.told.append((method, *args))


class Pool:
    """Engines whose agents answer at once."""

    fp8 = False

    def __init__(self, *engines: EngineEntry) -> None:
        self.engines = list(engines)
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}
        self.serving = False  # do enough engines serve what a link has brought?
        self.target: Target | None = None

    def hold(self) -> None:
        self.target = None

    def serves(self, version: int) -> bool:
        return self.serving

    def serve(self, target: Target, timeout: float) -> dict[str, float]:
        self.target = target
        return {"timing_s/update_weights_pull": 1.0}

    @contextmanager
    def reserved(self) -> Iterator[list[EngineEntry]]:
        yield self.engines

    def ask(self, engine: EngineEntry, what: str, timeout: float, **body: Any) -> "Future[Any]":
        self.asked.append((engine.name, what, body))
        future: Future[Any] = Future()
        answer = self.answers.get(engine.name, {"seconds": {"pause": float(engine.ranks)}})
        future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)
        return future
