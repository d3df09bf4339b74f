"""What a rollout agent knows of a link: it brings its engine in, but no byte passes through it."""

import logging
from dataclasses import dataclass

from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.protocol.group_offer import LinkOffer, shipment_of
from grpo_worker.weightsync.protocol.transfer_plan import Shipment

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AgentLink:
    """A link that the engine is a member of, and what is sent over it."""

    name: str
    shipment: Shipment


def enter(engine: Engine, offer: LinkOffer, bucket_bytes: int) -> AgentLink:
    """Bring the engine in. Raises PlanError and EngineError."""
    shipment = shipment_of(offer.layouts, bucket_bytes, offer.plan_id)
    engine.listen()
    place = offer.address, offer.port, offer.name, offer.world, offer.first, offer.backend
    if not engine.join_group(*place):
        leave(engine, AgentLink(offer.name, shipment))
        raise EngineError(f"{offer.name}: the engine takes no direct loads")
    return AgentLink(offer.name, shipment)


def leave(engine: Engine, link: AgentLink) -> None:
    """Take the engine out; it may be gone."""
    try:
        engine.leave_group(link.name)
    except EngineError as error:
        log.info("leaving %s: %s", link.name, error)
