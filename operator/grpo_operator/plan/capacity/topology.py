"""Which network leaves a job's pools use (pure).

Kubernetes' scheduler places pod by pod and in any order: engines of several hosts could each hold
part of a leaf and none be whole. So the operator says how many engines each leaf takes, which
their pods are then bound to, and which leaves the training pods should prefer.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_operator.plan.capacity.feasibility import room


@dataclass(frozen=True, slots=True)
class Leaves:
    """``trainer``: leaves that training pods prefer. ``rollout``: (leaf, number of its engines).

    ``reserved``: leaves that the engines need whole. All empty: pods go anywhere.
    """

    trainer: tuple[str, ...] = ()
    rollout: tuple[tuple[str, int], ...] = ()
    reserved: tuple[str, ...] = ()


def free_nodes(
    nodes: Sequence[dict[str, Any]],
    used: Mapping[str, int],
    shunned: Iterable[str],
    leaf_key: str,
    gpus: int,
) -> dict[str, int]:
    """Number of nodes of each leaf that have ``gpus`` to spare.

    ``used``: GPUs of other pods by node. ``shunned``: nodes that engines may not share.
    """
    avoided, count = set(shunned), Counter[str]()
    for node in nodes:
        offer = room(node)
        leaf = (node["metadata"].get("labels") or {}).get(leaf_key)
        if offer is None or not leaf or offer.name in avoided:
            continue
        if offer.gpus - used.get(offer.name, 0) >= gpus:
            count[leaf] += 1
    return dict(count)


def assign(
    free: Mapping[str, int], trainers: int, engines: int, hosts: int, before: Leaves = Leaves()
) -> Leaves:
    """Deal ``engines`` of ``hosts`` nodes out to leaves, as far as possible as ``before``.

    ``free``: nodes of each leaf that the engines may use, those they use already included.
    Returns Leaves() when the leaves cannot hold them all.
    """
    slots = {leaf: count // hosts for leaf, count in free.items()}
    if sum(slots.values()) < engines:
        return before if sum(count for _, count in before.rollout) == engines else Leaves()
    kept = {leaf: min(count, slots.get(leaf, 0)) for leaf, count in before.rollout}
    # Leaves that engines fill without a rest come first, and those that they are in already.
    order = sorted(slots, key=lambda leaf: (not kept.get(leaf), free[leaf] % hosts, leaf))
    for leaf in reversed(order):
        surplus = sum(kept.values()) - engines
        if surplus > 0:
            kept[leaf] = kept.get(leaf, 0) - min(kept.get(leaf, 0), surplus)
    for leaf in order:
        missing = engines - sum(kept.values())
        kept[leaf] = kept.get(leaf, 0) + min(slots[leaf] - kept.get(leaf, 0), missing)
    known = dict(before.rollout)  # KubeRay forgets the pods of a group that vanishes: keep it at 0
    rollout = tuple((leaf, count) for leaf, count in sorted(kept.items()) if count or leaf in known)
    reserved = tuple(leaf for leaf, count in rollout if count and free[leaf] == count * hosts)
    return Leaves(before.trainer or _left_over(free, kept, trainers, hosts), rollout, reserved)


def _left_over(
    free: Mapping[str, int], kept: Mapping[str, int], trainers: int, hosts: int
) -> tuple[str, ...]:
    """Leaves for the training pods: those without engines, then those with the most room."""
    rest = {leaf: count - kept.get(leaf, 0) * hosts for leaf, count in free.items()}
    chosen, lacking = [], trainers
    for leaf in sorted(rest, key=lambda leaf: (kept.get(leaf, 0) > 0, -rest[leaf], leaf)):
        if lacking > 0 and rest[leaf] > 0:
            chosen.append(leaf)
            lacking -= rest[leaf]
    return tuple(sorted(chosen))
