"""What a rollout agent knows of a link: it brings its engine in, but no byte passes through it."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_worker.weightsync.engine import Engine, EngineError
from grpo_worker.weightsync.link.shipment import Shipment, make_shipment
from grpo_worker.weightsync.manifest import Manifest
from grpo_worker.weightsync.plan import PlanError, make_plan

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkOffer:
    """How to join. ``address``, ``port``: of the store at the first trainer rank; ``world``: members, of
    which this engine's first is rank ``first``; ``layouts``: manifests without bytes of the trainer ranks;
    ``plan_id``: of what is made of them."""

    name: str
    address: str
    port: int
    world: int
    first: int
    backend: str
    layouts: Sequence[str]
    plan_id: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "LinkOffer":
        return cls(**{name: data[name] for name in cls.__dataclass_fields__})


@dataclass(frozen=True, slots=True)
class AgentLink:
    """A link that the engine is a member of, and what is sent over it."""

    name: str
    shipment: Shipment


def shipment_of(layouts: Sequence[str], bucket_bytes: int, plan_id: str | None = None) -> Shipment:
    """What the ranks of these layouts send. ``plan_id``: what the controller has found it to be.

    Raises PlanError when they do not form whole tensors, or another plan: members that cut other buckets
    would wait for each other.
    """
    found = make_shipment(make_plan([Manifest.from_json(text) for text in layouts]), bucket_bytes)
    if plan_id is not None and plan_id != found.plan_id:
        raise PlanError(f"the plan here is {found.plan_id}, the controller's is {plan_id}: other versions?")
    return found


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
