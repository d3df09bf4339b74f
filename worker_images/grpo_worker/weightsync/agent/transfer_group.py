"""Transfer group of the engine: the agent makes the engine join and leave; the weights bypass the agent."""

import logging
from dataclasses import dataclass

from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.protocol.group_offer import GroupOffer, transfer_plan_of
from grpo_worker.weightsync.protocol.transfer_plan import TransferPlan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    """A transfer group that the engine has joined, and the plan of what it receives there."""

    name: str
    transfer_plan: TransferPlan


def join(engine: Engine, offer: GroupOffer, bucket_bytes: int) -> JoinedGroup:
    """Make the engine join the offered group.

    Raises PlanError if the plan differs from the controller's, and EngineError if the engine does not join or
    does not support direct loads.
    """
    group = JoinedGroup(offer.name, transfer_plan_of(offer.layouts, bucket_bytes, offer.plan_id))
    engine.check_responsive()
    place = offer.address, offer.port, offer.name, offer.world, offer.first, offer.backend
    if not engine.join_group(*place):
        leave(engine, group)
        raise EngineError(f"{offer.name}: the engine does not support direct loads")
    return group


def leave(engine: Engine, group: JoinedGroup) -> None:
    """Make the engine leave a group. Errors are logged, because the engine may be gone."""
    try:
        engine.leave_group(group.name)
    except EngineError as error:
        log.info("leaving %s: %s", group.name, error)
