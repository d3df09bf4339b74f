"""Placement of samples on the ranks of engines (pure)."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from grpo_worker.rollout.engine_load import RankLoad


@dataclass(frozen=True, slots=True)
class Place:
    """Room for one sample on one rank of an engine. ``rank`` is None in an engine with a single rank."""

    engine: str
    rank: int | None
    tokens: int


@dataclass(slots=True)
class _Rank:
    load: RankLoad
    in_flight: int = 0
    new_tokens: int = 0  # of prompts that were sent after ``load`` was measured

    def has_room(self, tokens: int, queue: bool) -> bool:
        """Return whether a request fits; ``queue``: it may have to wait in the engine."""
        if self.in_flight == 0:
            return True
        unknown = self.load.max_tokens == 0
        fits = unknown or self.load.used_tokens + self.new_tokens + tokens <= self.load.max_tokens
        return fits and self.in_flight < self.load.room + (self.load.queue if queue else 0)

    @property
    def share(self) -> float:
        return self.in_flight / self.load.max_running


class Placement:
    """Requests in flight on each rank, and the room that the engines' own reports leave.

    Samples of one prompt go to one rank, whose cache holds the prompt, until that rank is full.
    """

    def __init__(self, default: RankLoad) -> None:
        """``default``: load assumed for an engine that reports none."""
        self._default = default
        self._engines: dict[str, list[_Rank]] = {}
        self._home: dict[int, tuple[str, int]] = {}  # prompt index -> engine and rank

    def report(self, engine: str, loads: Iterable[RankLoad]) -> None:
        """Replace the reported load of an engine's ranks."""
        ranks = self._ranks(engine)
        loads = list(loads)
        ranks.extend(_Rank(load) for load in loads[len(ranks) :])
        for rank, load in zip(ranks, loads, strict=False):
            rank.load, rank.new_tokens = load, 0

    def place(
        self, engines: Collection[str], prompt: int, tokens: int, avoid: Collection[str] = ()
    ) -> Place | None:
        """Return a place on one of ``engines``, or None while none has room.

        ``tokens``: those that the engine must read first. ``avoid``: engines that are used only if
        ``engines`` has no others.
        """
        allowed = set(engines) - set(avoid) or set(engines)
        found = self._find(allowed, prompt, tokens, False) or self._find(allowed, prompt, tokens, True)
        if found is None:
            return None
        self._home[prompt] = engine, number = found
        rank = self._rank(engine, number)
        rank.in_flight += 1
        rank.new_tokens += tokens
        return Place(engine, number if len(self._ranks(engine)) > 1 else None, tokens)

    def release(self, place: Place) -> None:
        """Give a place back."""
        self._rank(place.engine, place.rank or 0).in_flight -= 1

    def forget(self, prompt: int) -> None:
        """Forget which rank holds a prompt, of which no sample is left."""
        self._home.pop(prompt, None)

    def _find(
        self, allowed: Collection[str], prompt: int, tokens: int, queue: bool
    ) -> tuple[str, int] | None:
        engine, number = self._home.get(prompt, ("", 0))
        if engine in allowed and self._rank(engine, number).has_room(tokens, queue):
            return engine, number
        free = [
            (rank.share, name, index)
            for name in allowed
            for index, rank in enumerate(self._ranks(name))
            if rank.has_room(tokens, queue)
        ]
        return min(free)[1:] if free else None

    def _ranks(self, engine: str) -> list[_Rank]:
        return self._engines.setdefault(engine, [_Rank(self._default)])

    def _rank(self, engine: str, number: int) -> _Rank:
        return self._ranks(engine)[number]
