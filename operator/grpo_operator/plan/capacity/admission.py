"""Which jobs and pools must wait for room (pure): each starts whole or not at all.

Jobs that hold a RayCluster come first, then the others by age; a younger job may pass one that
waits for more than is free. With a Kueue queue the waiting is Kueue's.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_operator.api.names import Owner
from grpo_operator.plan.capacity.feasibility import PodRequest, place, rooms


@dataclass(frozen=True, slots=True)
class Claim:
    """A job or pool that wants pods. ``holds``: it has its RayCluster. ``since``: its creation."""

    key: Owner
    since: str
    holds: bool
    needs: Sequence[PodRequest]


def waiting(
    claims: Iterable[Claim], nodes: Sequence[dict[str, Any]], leaving: Iterable[str] = ()
) -> dict[Owner, str]:
    """Jobs that do not fit beside those before them, each with the reason.

    ``leaving``: names of nodes where pods of ended or deleted jobs have not gone yet; they count
    as taken, or the scheduler would meet half a job's room free and half not.
    """
    busy = set(leaving)
    free = [room for room in rooms(nodes) if room.name not in busy or not room.gpus]
    result: dict[Owner, str] = {}
    for claim in sorted(claims, key=lambda c: (not c.holds, c.since, c.key)):
        trial = copy.deepcopy(free)
        missing = place(claim.needs, trial)
        if missing is None or claim.holds:
            free = trial
        else:
            result[claim.key] = f"{missing.text('are free')}: waiting for other jobs to end"
    return result
