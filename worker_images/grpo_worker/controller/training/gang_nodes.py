"""Chooses the nodes on which a gang starts (pure)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PoolNode:
    """A Ray node of a pool, which is one pod. ``slots``: number of ranks for which it has room."""

    id: str
    address: str
    slots: int


def pool_nodes(nodes: Iterable[Mapping[str, Any]], resource: str) -> list[PoolNode]:
    """Return the living nodes that advertise the resource of a pool. ``nodes``: as ``ray.nodes()``."""
    return [
        PoolNode(node["NodeID"], node["NodeManagerAddress"], int(node["Resources"][resource]))
        for node in nodes
        if node["Alive"] and node["Resources"].get(resource)
    ]


def choose(
    nodes: Iterable[PoolNode],
    ranks: int,
    before: Collection[str],
    leaving: Collection[str] = (),
    failing: Collection[str] = (),
) -> list[PoolNode] | None:
    """Return the nodes for a gang, each as often as it gets ranks; None if there are too few nodes.

    ``before``: ids of the previous gang's nodes. They come first: their memory holds what the ranks saved.
    ``leaving``: ids of nodes that are about to end, so that ranks that start there would be lost at once.
    ``failing``: addresses where ranks have failed again and again; they come last.
    """
    staying = [node for node in nodes if node.id not in leaving]
    ordered = sorted(
        staying, key=lambda node: (node.address in failing, node.id not in before, node.address, node.id)
    )
    places = [node for node in ordered for _ in range(node.slots)]
    return places[:ranks] if len(places) >= ranks else None


def spares_of(nodes: Iterable[PoolNode], chosen: Sequence[PoolNode]) -> list[PoolNode]:
    """Return the nodes on which no rank of the gang runs."""
    used = {node.id for node in chosen}
    return [node for node in nodes if node.id not in used]
