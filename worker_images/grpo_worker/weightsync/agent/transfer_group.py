"""Transfer group of the engine: the agent makes the engine join and leave; the weights bypass the agent."""

import logging
import urllib.request
from dataclasses import dataclass

from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.protocol.group_offer import GroupOffer, check_plan, transfer_plan_of
from grpo_worker.weightsync.protocol.packed_layouts import split
from grpo_worker.weightsync.protocol.tiling import PlanError
from grpo_worker.weightsync.protocol.transfer_plan import TransferPlan

log = logging.getLogger(__name__)
_READ_SECONDS = 60.0  # without a byte


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    """A transfer group that the engine has joined, and the plan of what it receives there."""

    name: str
    transfer_plan: TransferPlan


def join(
    engine: Engine, offer: GroupOffer, bucket_bytes: int, known: TransferPlan | None = None
) -> JoinedGroup:
    """Make the engine join the offered group.

    ``known``: plan of an earlier group, which is used again if it is the offered one. Raises PlanError if the
    plan differs from the offered one or the trainer ranks do not answer, and EngineError if the engine does
    not join or does not support direct loads.
    """
    if known is None or known.plan_id != offer.plan_id:
        known = _read_plan(offer, bucket_bytes)
    group = JoinedGroup(offer.name, known)
    engine.check_responsive()
    place = offer.address, offer.port, offer.name, offer.world, offer.first, offer.backend
    if not engine.join_group(*place):
        leave(engine, group)
        raise EngineError(f"{offer.name}: the engine does not support direct loads")
    return group


def _read_plan(offer: GroupOffer, bucket_bytes: int) -> TransferPlan:
    """Return the plan that follows from the trainer ranks' layouts."""
    url = f"http://{offer.address}:{offer.layouts_port}/{offer.name}"
    try:
        with urllib.request.urlopen(url, timeout=_READ_SECONDS) as response:
            data = response.read()
    except OSError as error:
        raise PlanError(f"{url}: the trainer ranks' layouts do not come: {error}") from error
    plan = transfer_plan_of(split(data), bucket_bytes)
    check_plan(plan, offer)
    return plan


def leave(engine: Engine, group: JoinedGroup) -> None:
    """Make the engine leave a group. Errors are logged, because the engine may be gone."""
    try:
        engine.leave_group(group.name)
    except EngineError as error:
        log.info("leaving %s: %s", group.name, error)
