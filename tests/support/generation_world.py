"""Stand-in engines, the table that lists them, and a client, in virtual time."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from grpo_operator.api.v1alpha1.algorithm import AlgorithmSpec
from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.client import RolloutClient
from grpo_worker.rollout.routing import EngineEntry, EngineTable
from grpo_worker.rollout.sampling import Sample, sampling_params, sampling_seed
from support.stand_in_engines import END, StandInEngine, StandInEngines, log_prob, token
from support.virtual_loop import VirtualLoop

HANG = 240.0


class World:
    """Stand-in engines, the table that lists them, and a client in virtual time."""

    def __init__(
        self, count: int, n: int = 2, tokens: int = 200, partial: bool = False, assumed: int = 128,
        **engine: Any,
    ) -> None:  # fmt: skip
        """``assumed``: requests that run on an engine which reports no limit."""
        self.engines = {f"engine-{i}": StandInEngine(**engine) for i in range(count)}
        self.transport = StandInEngines(self.engines)
        self.table = EngineTable()
        self.table.replace([self.entry(name) for name in self.engines])
        self.loop = VirtualLoop()
        self.plan: list[tuple[float, Callable[[], None]]] = []
        self.client = RolloutClient(
            self.table, seed=3, n=n, timeout=60, partial=partial, hang_seconds=HANG, loop=self.loop,
            transport=self.transport, max_running=assumed,
        )  # fmt: skip
        self.client.set_sampling(sampling_params(AlgorithmSpec(), tokens, (END,)))

    def entry(self, name: str, **fields: Any) -> EngineEntry:
        return EngineEntry(name, name, EngineState.SERVING, self.engines[name].version, **fields)

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Run ``action`` ``seconds`` of virtual time after the next generation began."""
        self.plan.append((seconds, action))

    def generate(self, asked: list[Prompt], version: int = 1) -> list[Sample]:
        """Generate as the client does; the time stands still until all prompts are submitted."""
        groups = self.submit(asked, version)
        try:
            return [sample for group in groups for sample in group.result(120)]
        finally:
            for group in groups:
                group.cancel()

    def submit(self, asked: list[Prompt], version: int = 1) -> "list[Future[list[Sample]]]":
        with self.loop.held():
            for seconds, action in self.plan:
                self.loop.call_soon_threadsafe(self.loop.call_later, seconds, action)
            self.plan.clear()
            return [self.client.submit(prompt, version) for prompt in asked]

    def kill(self, name: str) -> None:
        self.engines[name].alive = False

    def close(self) -> None:
        self.client.close()


Worlds = Callable[..., World]


def prompts(count: int, length: int = 4) -> list[Prompt]:
    return [Prompt(index, tuple(range(2000 + index, 2000 + index + length))) for index in range(count)]


def expected(prompt: Prompt, number: int, tokens: int, seed: int = 3) -> tuple[int, ...]:
    """Return the undisturbed answer of ``tokens`` tokens."""
    own = sampling_seed(seed, prompt.index, number)
    return tuple(token(own, len(prompt.ids) + position) for position in range(tokens))


def assert_undisturbed(samples: list[Sample], asked: list[Prompt], n: int, tokens: int) -> None:
    assert [(s.prompt_index, s.number) for s in samples] == [(p.index, k) for p in asked for k in range(n)]
    for sample, (prompt, number) in zip(samples, [(p, k) for p in asked for k in range(n)], strict=True):
        assert tuple(sample.ids) == expected(prompt, number, tokens)
        assert list(sample.log_probs) == pytest.approx([log_prob(token_id) for token_id in sample.ids])
