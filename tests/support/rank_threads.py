"""An engine whose ranks are threads with real streams, recipes and loaders; only SGLang is a stand-in."""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.protocol.agent_stream import place_of_rank
from grpo_worker.weightsync.protocol.direct_load import MARK, DirectLoad
from grpo_worker.weightsync.protocol.tiling import TensorPlan
from grpo_worker.weightsync.sglang_plugin import engine_ranks, versions
from grpo_worker.weightsync.sglang_plugin.agent_stream import AgentStream
from grpo_worker.weightsync.sglang_plugin.recipes import Recipes
from grpo_worker.weightsync.sglang_plugin.staged_receiver import specs_of


class ThreadedEngine(Engine):
    """Engine of one rank for each of ``models``.

    ``spoil``: called with a rank and the bytes of a bucket that it has received. ``calls``: of the agent.
    ``received``: bytes that each rank has received for the last version.
    """

    def __init__(self, models: Sequence[Any], patch: Any) -> None:
        super().__init__("http://127.0.0.1:9", 1)
        self.models = list(models)
        self.spoil: Callable[[int, torch.Tensor], None] = lambda rank, flat: None
        self.calls: list[str] = []
        self.received: list[int] = []
        self.lives = True
        self._version = "default"
        self._streams: list[AgentStream] = []
        self._ranks = _Ranks(len(self.models))
        patch.setattr(engine_ranks, "gather", self._ranks.gather)
        self.recipes = Recipes()
        patch.setattr(versions, "RECIPES", self.recipes)
        patch.setattr(versions, "_part_loaders", {})

    def join_group(self, address: str, port: int, group: str, *_: Any, **__: Any) -> str:
        for stream in self._streams:
            stream.close()
        ranks = len(self.models)
        places = [place_of_rank(address, port, rank, ranks) for rank in range(ranks)]
        self._streams = [_Spoiled(self, *place, group, rank) for rank, place in enumerate(places)]
        return MARK

    def receive_all(
        self,
        group: str,
        tensors: Sequence[TensorPlan],
        version: str,
        load: DirectLoad,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        request = DirectLoad.from_load_format(load.to_load_format())
        rows = iter([(t.name, getattr(torch, t.dtype), t.shape) for t in tensors])
        buckets = [specs_of(next(rows) for _ in range(count)) for count in request.counts]

        def run(rank: int) -> tuple[bool, str]:
            self._ranks.current.rank = rank
            self._streams[rank].wait_at_most(request.patience)
            return versions.load_version([self.models[rank]], "cpu", request, buckets, self._streams[rank])

        with ThreadPoolExecutor(len(self.models)) as threads:
            answers = list(threads.map(run, range(len(self.models))))
        if not all(success for success, _ in answers):
            raise EngineError(answers[0][1])
        self._version = version
        reports = [json.loads(text) for _, text in answers]
        self.received = [report["received"] for report in reports]
        return dict(reports[0])

    def alive(self) -> bool:
        return self.lives

    def check_responsive(self) -> None: ...

    def weight_version(self) -> str:
        return self._version

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")

    def begin_update(self) -> None:
        self.calls.append("begin")

    def end_update(self) -> None:
        self.calls.append("end")

    def leave_group(self, group: str) -> None:
        self.calls.append("leave")


class _Ranks:
    """Collectives of the ranks' threads."""

    def __init__(self, count: int) -> None:
        self.current = threading.local()
        self._values: list[Any] = [None] * count
        self._barrier = threading.Barrier(count)

    def gather(self, value: Any) -> list[Any]:
        self._values[self.current.rank] = value
        self._barrier.wait(30)
        values = list(self._values)
        self._barrier.wait(30)
        return values


class _Spoiled(AgentStream):
    def __init__(self, engine: ThreadedEngine, address: str, port: int, name: str, rank: int) -> None:
        super().__init__(address, port, name, rank)
        self._engine, self._rank = engine, rank

    def read_into(self, flat: torch.Tensor) -> None:
        super().read_into(flat)
        self._engine.spoil(self._rank, flat)
