"""What a rollout agent knows of a link: it brings its engine in, but no byte passes through it."""

import logging
from dataclasses import dataclass

from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.protocol.group_offer import GroupOffer, transfer_plan_of
from grpo_worker.weightsync.protocol.transfer_plan import TransferPlan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JoinedGroup:
    """A link that the engine is a member of, and what is sent over it."""

    name: str
    transfer_plan: TransferPlan


def enter(engine: Engine, offer: GroupOffer, bucket_bytes: int) -> JoinedGroup:
    """Bring the engine in. Raises PlanError and EngineError."""
    transfer_plan = transfer_plan_of(offer.layouts, bucket_bytes, offer.plan_id)
    engine.listen()
    place = offer.address, offer.port, offer.name, offer.world, offer.first, offer.backend
    if not engine.join_group(*place):
        leave(engine, JoinedGroup(offer.name, transfer_plan))
        raise EngineError(f"{offer.name}: the engine takes no direct loads")
    return JoinedGroup(offer.name, transfer_plan)


def leave(engine: Engine, link: JoinedGroup) -> None:
    """Take the engine out; it may be gone."""
    try:
        engine.leave_group(link.name)
    except EngineError as error:
        log.info("leaving %s: %s", link.name, error)
