"""Invitation of an engine to a transfer group, and the plan of the transfers in it."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_operator.api.weight_path import Backend
from grpo_worker.weightsync.protocol.manifest import Manifest
from grpo_worker.weightsync.protocol.tiling import PlanError, make_plan
from grpo_worker.weightsync.protocol.transfer_plan import TransferPlan, make_transfer_plan


@dataclass(frozen=True, slots=True)
class GroupOffer:
    """Everything that a trainer rank or an engine needs to join the transfer group ``name``.

    ``address``, ``port``: of the rendezvous store, at the first trainer rank.
    ``layouts_port``: at which the first trainer rank serves the layouts of all trainer ranks.
    ``world``: number of members. All trainer ranks come first, then all engine ranks.
    ``first``: rank of the invited engine's first rank.
    ``plan_id``: identity of the transfer plan, which every member computes from the layouts.
    ``bucket_bytes``: size of a bucket in that plan.
    """

    name: str
    address: str
    port: int
    layouts_port: int
    world: int
    first: int
    backend: Backend
    plan_id: str
    bucket_bytes: int

    def to_json(self) -> dict[str, Any]:
        """Return the offer as JSON-compatible data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "GroupOffer":
        """Read an offer. Raises KeyError for a missing field and ValueError for an unknown backend."""
        fields = {name: data[name] for name in cls.__dataclass_fields__}
        return cls(**fields | {"backend": Backend(data["backend"])})


@dataclass(frozen=True, slots=True)
class PlannedTransfer:
    """A trainer rank's answer once it has planned the transfers: its plan's id, or why there is no plan."""

    plan_id: str
    problem: str = ""


def transfer_plan_of(layouts: Sequence[str], bucket_bytes: int) -> TransferPlan:
    """Return the transfer plan of trainer ranks with these layouts (manifests without bytes, as JSON).

    Raises PlanError when the layouts do not form whole tensors.
    """
    return make_transfer_plan(make_plan([Manifest.from_json(text) for text in layouts]), bucket_bytes)


def check_plan(plan: TransferPlan, offer: GroupOffer) -> None:
    """Raise PlanError unless ``plan`` is the offered one.

    Members with different buckets would wait for each other until their patience ends.
    """
    if plan.plan_id != offer.plan_id:
        raise PlanError(
            f"the transfer plan here is {plan.plan_id}, the offered one is {offer.plan_id}: use one release"
        )
