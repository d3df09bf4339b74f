"""Which job writes to a RolloutPool that has no job of its own (pure): one at a time, in turn.

A job that holds a RayCluster comes first, then the older: whoever writes goes on until it ends or is
suspended.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from grpo_operator.api.names import Owner


@dataclass(frozen=True, slots=True)
class PoolCandidate:
    """A job that wants a pool. ``pool``: its name. ``holds``: the job has pods. ``since``: its creation."""

    job: Owner
    pool: str
    since: str
    holds: bool


def bind(suitors: Iterable[PoolCandidate]) -> dict[Owner, Owner]:
    """The writer of each pool that somebody wants."""
    result: dict[Owner, Owner] = {}
    for suitor in sorted(suitors, key=lambda s: (not s.holds, s.since, s.job)):
        pool = Owner("RolloutPool", suitor.job.namespace, suitor.pool)
        result.setdefault(pool, suitor.job)
    return result
