"""Assigns network leaves to a job's pools (pure).

Kubernetes' scheduler places pods one by one and in any order, so several multi-host engines could each get
some of a leaf's nodes, and none all that it needs. The operator therefore decides how many engines each leaf
gets and binds their pods to it, and decides which leaves the training pods prefer.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from grpo_operator.plan.capacity.feasibility import node_capacity


@dataclass(frozen=True, slots=True)
class Leaves:
    """Leaves of both pools. All empty: pods may run anywhere.

    ``trainer``: leaves that training pods prefer. ``rollout``: (leaf, number of its engines). ``reserved``:
    leaves of which the engines need every node.
    """

    trainer: tuple[str, ...] = ()
    rollout: tuple[tuple[str, int], ...] = ()
    reserved: tuple[str, ...] = ()

    def wire(self) -> dict[str, Any]:
        """Return the leaves as JSON-compatible data."""
        lists = {name: list(value) for name, value in asdict(self).items()}
        return lists | {"rollout": [list(pair) for pair in self.rollout]}

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> "Leaves":
        """Return the leaves of ``wire``."""
        rollout = tuple((leaf, count) for leaf, count in data["rollout"])
        return cls(tuple(data["trainer"]), rollout, tuple(data["reserved"]))


def free_nodes(
    nodes: Sequence[dict[str, Any]],
    used: Mapping[str, int],
    excluded: Iterable[str],
    leaf_key: str,
    gpus: int,
) -> dict[str, int]:
    """Return, for each leaf, the number of nodes that have ``gpus`` free GPUs.

    ``used``: GPUs of other pods by node. ``excluded``: nodes that engines must not use.
    """
    excluded_nodes, count = set(excluded), Counter[str]()
    for node in nodes:
        capacity = node_capacity(node)
        leaf = (node["metadata"].get("labels") or {}).get(leaf_key)
        if capacity is None or not leaf or capacity.name in excluded_nodes:
            continue
        if capacity.gpus - used.get(capacity.name, 0) >= gpus:
            count[leaf] += 1
    return dict(count)


def assign(
    free: Mapping[str, int], trainers: int, engines: int, hosts: int, before: Leaves = Leaves()
) -> Leaves:
    """Distribute ``engines`` of ``hosts`` nodes each over the leaves; keep ``before`` as far as possible.

    ``free``: nodes of each leaf that the engines may use, including those that they use already.
    Returns Leaves() when the engines do not fit.
    """
    slots = {leaf: count // hosts for leaf, count in free.items()}
    if sum(slots.values()) < engines:
        return before if sum(count for _, count in before.rollout) == engines else Leaves()
    kept = {leaf: min(count, slots.get(leaf, 0)) for leaf, count in before.rollout}
    # First the leaves that have engines already, then those that engines fill completely.
    order = sorted(slots, key=lambda leaf: (not kept.get(leaf), free[leaf] % hosts, leaf))
    for leaf in reversed(order):
        surplus = sum(kept.values()) - engines
        if surplus > 0:
            kept[leaf] = kept.get(leaf, 0) - min(kept.get(leaf, 0), surplus)
    for leaf in order:
        missing = engines - sum(kept.values())
        kept[leaf] = kept.get(leaf, 0) + min(slots[leaf] - kept.get(leaf, 0), missing)
    known = dict(before.rollout)  # a group that is removed would orphan its pods in KubeRay: keep it at 0
    rollout = tuple((leaf, count) for leaf, count in sorted(kept.items()) if count or leaf in known)
    reserved = tuple(leaf for leaf, count in rollout if count and free[leaf] == count * hosts)
    return Leaves(before.trainer or _left_over(free, kept, trainers, hosts), rollout, reserved)


def _left_over(
    free: Mapping[str, int], kept: Mapping[str, int], trainers: int, hosts: int
) -> tuple[str, ...]:
    """Return leaves for the training pods: first those without engines, then those with most free nodes."""
    rest = {leaf: count - kept.get(leaf, 0) * hosts for leaf, count in free.items()}
    chosen, missing = [], trainers
    for leaf in sorted(rest, key=lambda leaf: (kept.get(leaf, 0) > 0, -rest[leaf], leaf)):
        if missing > 0 and rest[leaf] > 0:
            chosen.append(leaf)
            missing -= rest[leaf]
    return tuple(sorted(chosen))
