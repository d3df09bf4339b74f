"""Placement of samples on the ranks of engines (pure)."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from grpo_worker.rollout.engine_load import RankLoad
from grpo_worker.rollout.engine_room import AT_ONCE, EngineRoom, RankRoom


@dataclass(frozen=True, slots=True)
class Place:
    """Room for one sample on one rank of an engine. ``rank`` is None in an engine with a single rank."""

    engine: str
    rank: int | None
    tokens: int


class Placement:
    """Requests in flight on each rank, and the room that the engines' own reports leave.

    Samples of one prompt go to one rank, whose cache holds the prompt, until that rank is full.
    """

    def __init__(self, default: RankLoad) -> None:
        """``default``: load assumed for an engine that reports none."""
        self._default = default
        self._engines: dict[str, EngineRoom] = {}
        self._home: dict[int, tuple[str, int]] = {}  # prompt index -> engine and rank

    def report(self, engine: str, loads: Iterable[RankLoad]) -> None:
        """Replace the reported load of an engine's ranks."""
        self._room(engine).report(list(loads))

    def place(
        self, engines: Collection[str], prompt: int, tokens: int, avoid: Collection[str] = ()
    ) -> Place | None:
        """Return a place on one of ``engines``, or None while none has room.

        ``tokens``: those that the engine must read first. ``avoid``: engines that are used only if
        ``engines`` has no others.
        """
        allowed = set(engines) - set(avoid) or set(engines)
        found = self._find(allowed, prompt, tokens)
        if found is None:
            return None
        self._home[prompt] = engine, number = found
        room = self._room(engine)
        room.take(number, tokens)
        return Place(engine, number if len(room.ranks) > 1 else None, tokens)

    def release(self, place: Place) -> None:
        """Give a place back."""
        self._room(place.engine).release(place.rank or 0)

    def forget(self, prompt: int) -> None:
        """Forget which rank holds a prompt, of which no sample is left."""
        self._home.pop(prompt, None)

    def _find(self, allowed: Collection[str], prompt: int, tokens: int) -> tuple[str, int] | None:
        """Return the prompt's own rank, or the emptiest one; if all are full, one where the sample waits."""
        home, level = self._home.get(prompt), None
        if home is not None and home[0] in allowed:
            level = self._room(home[0]).level_for(home[1], tokens)
            if level == AT_ONCE:
                return home
        rooms = ((name, self._room(name).emptiest(tokens)) for name in allowed)
        best = min(((*room[:2], name, room[2]) for name, room in rooms if room is not None), default=None)
        if level is not None and (best is None or best[0] != AT_ONCE):
            return home
        return None if best is None else best[2:]

    def _room(self, engine: str) -> EngineRoom:
        if engine not in self._engines:
            self._engines[engine] = EngineRoom([RankRoom(self._default)])
        return self._engines[engine]
