"""Load of an engine's ranks, as SGLang's ``GET /v1/loads`` reports it (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RankLoad:
    """Load of one attention data-parallel rank, which has a queue and a KV cache of its own.

    ``running``, ``waiting``: requests. ``used_tokens``, ``max_tokens``: KV cache, without what can be
    evicted; ``max_tokens`` 0: unknown. ``max_running``: limit of ``running``.
    """

    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    max_tokens: int = 0
    max_running: int = 1

    @property
    def queue(self) -> int:
        """Requests that wait in the engine so that its next batch is full when an answer ends."""
        return max(1, self.max_running // 32)

    @property
    def room(self) -> int:
        """Requests that the rank can run at once.

        A rank that makes requests wait shows how many it can run: its KV cache is full.
        """
        return self.running if self.waiting else self.max_running


def rank_loads(answer: Mapping[str, Any]) -> tuple[RankLoad, ...]:
    """Return the load of each rank, in the ranks' order. Raises ValueError for another kind of answer."""
    try:
        loads = sorted(answer["loads"], key=lambda load: int(load["dp_rank"]))
        ranks = tuple(
            RankLoad(
                running=int(load["num_running_reqs"]),
                waiting=int(load["num_waiting_reqs"]),
                used_tokens=int(load["num_used_tokens"]),
                max_tokens=int(load["max_total_num_tokens"]),
                max_running=int(load["max_running_requests"]),
            )
            for load in loads
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"/v1/loads: unexpected answer: {error!r}") from error
    if not ranks or any(rank.max_running < 1 for rank in ranks):
        raise ValueError("/v1/loads: no rank reports max_running_requests yet")
    return ranks
