"""Room on the ranks of one engine: the emptiest rank is found without a look at the others (pure)."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from grpo_worker.rollout.engine_load import RankLoad

AT_ONCE, IN_QUEUE = 0, 1  # whether a request would run at once or wait in its engine


@dataclass(slots=True)
class RankRoom:
    """Load of one rank, and the requests in flight on it.

    ``new_tokens``: of prompts that were sent after ``load`` was measured.
    """

    load: RankLoad
    in_flight: int = 0
    new_tokens: int = 0
    changes: int = 0

    @property
    def level(self) -> int | None:
        """AT_ONCE or IN_QUEUE; None: the rank is full."""
        if self.in_flight == 0 or self.in_flight < self.load.room:
            return AT_ONCE
        return IN_QUEUE if self.in_flight < self.load.room + self.load.queue else None

    @property
    def free_tokens(self) -> float:
        """Largest request that fits into the KV cache; an idle rank takes any, and so does an unknown one."""
        if self.in_flight == 0 or self.load.max_tokens == 0:
            return math.inf
        return self.load.max_tokens - self.load.used_tokens - self.new_tokens

    @property
    def share(self) -> float:
        """Requests in flight by those that the rank can run."""
        return self.in_flight / self.load.max_running


@dataclass(slots=True)
class EngineRoom:
    """Ranks of one engine.

    ``_open`` is a heap of (level, share, rank, changes); an entry is outdated if its rank has changed since.
    Ranks whose KV cache was too full for a request go to ``_narrow``, a heap of (-free tokens, rank,
    changes), until a smaller request comes or they change.
    """

    ranks: list[RankRoom]
    _open: list[tuple[int, float, int, int]] = field(default_factory=list)
    _narrow: list[tuple[float, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rebuild()

    def report(self, loads: Sequence[RankLoad]) -> None:
        """Replace the load of the ranks."""
        self.ranks.extend(RankRoom(load) for load in loads[len(self.ranks) :])
        for rank, load in zip(self.ranks, loads, strict=False):
            rank.load, rank.new_tokens = load, 0
        self._rebuild()

    def take(self, number: int, tokens: int) -> None:
        """Add a request to a rank."""
        rank = self.ranks[number]
        rank.in_flight += 1
        rank.new_tokens += tokens
        self._changed(number)

    def release(self, number: int) -> None:
        """Remove a request from a rank."""
        self.ranks[number].in_flight -= 1
        self._changed(number)

    def level_for(self, number: int, tokens: int) -> int | None:
        """Return how a rank would take a request; None: it has no room."""
        rank = self.ranks[number]
        return rank.level if tokens <= rank.free_tokens else None

    def emptiest(self, tokens: int) -> tuple[int, float, int] | None:
        """Return level, share and number of the rank that should take a request; None: none has room."""
        while self._narrow and (self._is_old(*self._narrow[0][1:]) or -self._narrow[0][0] >= tokens):
            _, number, changes = heapq.heappop(self._narrow)
            if not self._is_old(number, changes):
                self._push(number)
        while self._open:
            level, share, number, changes = self._open[0]
            if self._is_old(number, changes):
                heapq.heappop(self._open)
                continue
            free = self.ranks[number].free_tokens
            if free >= tokens:
                return level, share, number
            heapq.heappop(self._open)
            heapq.heappush(self._narrow, (-free, number, changes))
        return None

    def _is_old(self, number: int, changes: int) -> bool:
        return self.ranks[number].changes != changes

    def _changed(self, number: int) -> None:
        self.ranks[number].changes += 1
        if len(self._open) + len(self._narrow) > 4 * len(self.ranks) + 16:  # mostly outdated
            self._rebuild()
        else:
            self._push(number)

    def _push(self, number: int) -> None:
        rank = self.ranks[number]
        if rank.level is not None:
            heapq.heappush(self._open, (rank.level, rank.share, number, rank.changes))

    def _rebuild(self) -> None:
        self._narrow.clear()
        self._open = [
            (rank.level, rank.share, number, rank.changes)
            for number, rank in enumerate(self.ranks)
            if rank.level is not None
        ]
        heapq.heapify(self._open)
