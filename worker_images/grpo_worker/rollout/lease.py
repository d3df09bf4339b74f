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
    """Requests on one engine and what was last seen of it."""

    leases: set[Lease] = field(default_factory=set)
    moved: float = 0.0  # last token of any request, or last change of its reported load
    loads: tuple[RankLoad, ...] = ()

    def has_lost_some(self, before: float) -> bool:
        """Return whether the engine reports fewer requests than are open since ``before``."""
        known = sum(load.running + load.waiting for load in self.loads)
        return bool(self.loads) and known < sum(lease.started <= before for lease in self.leases)
