"""The watched table reads and changes the pool's entries."""

from dataclasses import replace
from typing import Any

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_rehearsal.timed_pool import PoolWaits, WatchedTable
from grpo_worker.rollout.routing import EngineEntry, EngineTable


class Clock:
    now = 0.0


def test_a_suspicion_and_its_end_reach_the_pool() -> None:
    pool, clock = EngineTable(), Clock()
    entry = EngineEntry("engine-0", "10.0.0.1", EngineState.SERVING, 3)
    pool.update(entry)
    scheduler: Any = clock
    watched = WatchedTable(pool, scheduler, PoolWaits())
    assert watched.entry("engine-0") == entry and watched.entry("engine-1") is None
    watched.suspect("engine-0", "silent")
    suspected = replace(entry, state=EngineState.RESTARTING, version=None, reason="silent")
    assert pool.entry("engine-0") == watched.entry("engine-0") == suspected
    watched.trust(entry, "silent")
    assert pool.entries() == [entry]
