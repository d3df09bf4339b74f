"""Stand-ins of engines and rewards for tests of sampling."""

from concurrent.futures import Future
from typing import Any

from grpo_worker.data.prompts import Prompt
from grpo_worker.rollout.sampling import Sample

N, WANTED = 16, 8


class Scorer:
    """A reward that judges at once. ``needs_groups``: in one call for a group."""

    needs_groups = True

    def forget(self) -> None: ...

    def start(self, samples: list[Sample]) -> "Future[list[float]]":
        done: Future[list[float]] = Future()
        done.set_result(self.score(samples))
        return done

    def score(self, samples: list[Sample]) -> list[float]:
        raise NotImplementedError


class Even(Scorer):
    """Generates for every prompt; only groups of even prompts get unequal rewards."""

    def submit(self, prompt: Prompt, version: int, arrived: Any = None) -> "Future[list[Sample]]":
        done: Future[list[Sample]] = Future()
        done.set_result(self.generate([prompt], version))
        return done

    def generate(self, prompts: list[Prompt], version: int, cancelled: Any = None) -> list[Sample]:
        return [Sample(p.index, k, (5,), (-0.1,), version, "e") for p in prompts for k in range(N)]

    def score(self, samples: list[Sample]) -> list[float]:
        return [float(s.prompt_index % 2 == 0 and s.number == 0) for s in samples]
