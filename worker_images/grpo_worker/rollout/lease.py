"""Leases of places on engines by requests, and the activity of an engine that they show."""

import asyncio
from dataclasses import dataclass, field

from grpo_worker.rollout.engine_load import RankLoad
from grpo_worker.rollout.placement import Place
from grpo_worker.rollout.routing import EngineEntry


@dataclass(slots=True, eq=False)
class Lease:
    """Place of one request on an engine. ``started``, ``moved``: times of its start and its last token.

    ``trial``: the prompt is suspected to make engines fail.
    """

    entry: EngineEntry
    place: Place
    trial: bool
    started: float
    moved: float
    scope: asyncio.Timeout | None = None  # expired by the dispatcher when the engine is silent


@dataclass(slots=True)
class Activity:
    """Requests on one engine and what was last seen of it.

    ``silent``: entry under which nothing of it moved, so that it gets no request; None: it moves.
    """

    leases: set[Lease] = field(default_factory=set)
    moved: float = 0.0  # last token of any request, or last change of its reported load
    loads: tuple[RankLoad, ...] = ()
    silent: EngineEntry | None = None

    def moves(self, now: float) -> None:
        """Note a token, or a change of the load."""
        self.moved, self.silent = now, None

    def usable(self, entry: EngineEntry) -> bool:
        """Return whether the engine moves, or has reached another state since it was silent.

        ``entry``: as its agent reports it, which may not know that the scheduler hangs.
        """
        before = self.silent
        return before is None or (before.life, before.since) != (entry.life, entry.since)

    def has_lost_some(self, before: float) -> bool:
        """Return whether the engine reports fewer requests than are open since ``before``."""
        known = sum(load.running + load.waiting for load in self.loads)
        return bool(self.loads) and known < sum(lease.started <= before for lease in self.leases)
