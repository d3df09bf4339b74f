"""Services of a rollout pool, and its worker groups (pure)."""

from typing import Any

from grpo_operator.api import names
from grpo_operator.api.names import AGENT_PORT, ENGINE_PORT, owner_of
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.plan.capacity.topology import Leaves
from grpo_operator.render.metadata import metadata

NO_LEAVES = Leaves()
MAX_LEAVES = 15  # Kueue allows 18 pod sets: head, controller, trainer and 15 leaves


def rollout_groups(pool: RolloutTemplate, leaves: Leaves) -> list[tuple[str, str | None, int]]:
    """Return (worker group, leaf, number of engines): one group per leaf, or one group for all engines."""
    if 0 < len(leaves.rollout) <= MAX_LEAVES:
        return [(names.leaf_group(leaf), leaf, count) for leaf, count in leaves.rollout]
    return [(names.ROLLOUT, None, pool.replicas)]


def rollout_service(owner: dict[str, Any], pool: RolloutTemplate) -> dict[str, Any]:
    """Return the headless service by which the controller discovers all engines, ready or not."""
    first = {names.HOST_INDEX: "0"} if pool.engine.nodes_per_engine > 1 else {}
    selector = owner_of(owner).labels(names.ROLLOUT) | first
    return _headless(
        owner, owner_of(owner).rollout_service, selector, {"engine": ENGINE_PORT, "agent": AGENT_PORT}
    )


def engine_services(
    owner: dict[str, Any], pool: RolloutTemplate, leaves: Leaves = NO_LEAVES
) -> list[dict[str, Any]]:
    """Return a service for the first host of each multi-host engine: the rendezvous of its hosts."""
    if pool.engine.nodes_per_engine == 1:
        return []
    pool_owner = owner_of(owner)
    return [
        _headless(
            owner,
            pool_owner.engine_service(group, index),
            pool_owner.labels(names.ROLLOUT)
            | {names.GROUP: group, names.REPLICA_INDEX: str(index), names.HOST_INDEX: "0"},
            {"rendezvous": names.RENDEZVOUS_PORT, "agent": AGENT_PORT},
        )
        for group, _, engines in rollout_groups(pool, leaves)
        for index in range(engines)
    ]


def _headless(
    owner: dict[str, Any], name: str, selector: dict[str, str], ports: dict[str, int]
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(owner, name),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": selector,
            "ports": [{"name": name, "port": port, "protocol": "TCP"} for name, port in ports.items()],
        },
    }
