"""Decides which jobs and pools wait, for nodes or for a shared RolloutPool (pure).

Each job or pool starts whole or not at all. Those that hold a RayCluster come first, then the others by age;
a younger job may start before an older one that needs more than is free. With a Kueue queue, Kueue decides.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_operator.api.names import Owner
from grpo_operator.plan.capacity.feasibility import PodRequest, node_capacities, place


@dataclass(frozen=True, slots=True)
class Claim:
    """A job or pool that needs pods. ``holds``: it has its RayCluster. ``since``: time of its creation."""

    key: Owner
    since: str
    holds: bool
    requests: Sequence[PodRequest]


def waiting(
    claims: Iterable[Claim], nodes: Sequence[dict[str, Any]], leaving: Iterable[str] = ()
) -> dict[Owner, str]:
    """Return the owners that do not fit beside those before them, each with the reason.

    ``leaving``: names of nodes on which pods of ended or deleted jobs still run. GPU nodes among them count
    as used, because otherwise the scheduler could place only half of a job.
    """
    busy = set(leaving)
    free = [node for node in node_capacities(nodes) if node.name not in busy or not node.gpus]
    result: dict[Owner, str] = {}
    for claim in sorted(claims, key=lambda c: (not c.holds, c.since, c.key)):
        trial = copy.deepcopy(free)
        missing = place(claim.requests, trial)
        if missing is None or claim.holds:
            free = trial
        else:
            result[claim.key] = f"{missing.text('beside other jobs')}: waiting for other jobs to end"
    return result


@dataclass(frozen=True, slots=True)
class PoolCandidate:
    """A job that references a RolloutPool. ``pool``: the pool's name. ``holds``: the job has pods.
    ``since``: time of the job's creation.
    """

    job: Owner
    pool: str
    since: str
    holds: bool


def bind(candidates: Iterable[PoolCandidate]) -> dict[Owner, Owner]:
    """Return the job that each referenced pool is bound to.

    One job at a time writes weights to a pool. A job that has pods comes first, so the bound job keeps the
    pool until it ends or is suspended; then the oldest job follows.
    """
    result: dict[Owner, Owner] = {}
    for candidate in sorted(candidates, key=lambda c: (not c.holds, c.since, c.job)):
        pool = Owner("RolloutPool", candidate.job.namespace, candidate.pool)
        result.setdefault(pool, candidate.job)
    return result
