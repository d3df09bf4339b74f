"""How an engine joins a transfer group, and what is sent in it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_worker.weightsync.protocol.manifest import Manifest
from grpo_worker.weightsync.protocol.tiling import PlanError, make_plan
from grpo_worker.weightsync.protocol.transfer_plan import TransferPlan, make_transfer_plan


@dataclass(frozen=True, slots=True)
class GroupOffer:
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
    def from_json(cls, data: dict[str, Any]) -> "GroupOffer":
        return cls(**{name: data[name] for name in cls.__dataclass_fields__})


def transfer_plan_of(layouts: Sequence[str], bucket_bytes: int, plan_id: str | None = None) -> TransferPlan:
    """What the ranks of these layouts send. ``plan_id``: what the controller has found it to be.

    Raises PlanError when they do not form whole tensors, or another plan: members that cut other buckets
    would wait for each other.
    """
    found = make_transfer_plan(make_plan([Manifest.from_json(text) for text in layouts]), bucket_bytes)
    if plan_id is not None and plan_id != found.plan_id:
        raise PlanError(f"the plan here is {found.plan_id}, the controller's is {plan_id}: other versions?")
    return found
