"""Can the cluster ever hold the job's pods? (pure: nodes and pods in, a message out)

First-fit decreasing over *empty* nodes: "no" means that no amount of waiting helps, "yes" leaves
the rest to the scheduler. An infeasible job never gets a pod.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

GPU = "nvidia.com/gpu"
_BINARY = {unit: 2 ** (10 * power) for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"), 1)}
_DECIMAL = {unit: 10 ** (3 * power) for power, unit in enumerate(("k", "M", "G", "T", "P", "E"), 1)}
_UNITS: dict[str, float] = _BINARY | _DECIMAL | {"": 1, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_QUANTITY = re.compile(r"([0-9.]+(?:[eE][0-9]+)?)([A-Za-z]*)")


@dataclass(frozen=True, slots=True)
class PodRequest:
    """``count`` equal pods of one pool. cpu in cores, memory in bytes."""

    pool: str
    field_name: str
    count: int
    cpu: float
    memory: int
    gpus: int = 0
    node_selector: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class NodeRoom:
    """What a node offers, reduced as pods are placed."""

    name: str
    cpu: float
    memory: int
    gpus: int
    labels: dict[str, str]

    def takes(self, need: PodRequest) -> bool:
        matches = need.node_selector.items() <= self.labels.items()
        return matches and self.cpu >= need.cpu and self.memory >= need.memory and self.gpus >= need.gpus


def quantity(text: str) -> float:
    """A Kubernetes quantity as a number: ``500m`` -> 0.5, ``2Gi`` -> 2147483648, ``100k`` -> 100000.

    Raises ValueError for what is no quantity.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is no Kubernetes quantity")
    return float(match[1]) * _UNITS[match[2]]


def room(node: dict[str, Any]) -> NodeRoom | None:
    """Room of a node object; None when it takes no new pods."""
    if node["spec"].get("unschedulable") or not _ready(node):
        return None
    offer = node["status"].get("allocatable") or {}
    return NodeRoom(
        name=node["metadata"]["name"],
        cpu=quantity(offer.get("cpu", "0")),
        memory=int(quantity(offer.get("memory", "0"))),
        gpus=int(quantity(offer.get(GPU, "0"))),
        labels=node["metadata"].get("labels") or {},
    )


@dataclass(frozen=True, slots=True)
class Missing:
    """The first pod that found no node. ``placed``: pods of its pool that did."""

    need: PodRequest
    placed: int
    nodes: int

    def text(self, ending: str) -> str:
        """Field, value and what is lacking; ``ending`` says which nodes are meant."""
        need = self.need
        each = f"{need.cpu:g} CPU, {need.memory / 2**30:.1f} GiB"
        if need.gpus:
            each += f", {need.gpus} GPUs"
        return (
            f"{need.field_name}={need.count}: only {self.placed} of {need.count} {need.pool} pods "
            f"({each} each) fit on the {self.nodes} schedulable nodes of this cluster that {ending}"
        )


def _ready(node: dict[str, Any]) -> bool:
    conditions = node["status"].get("conditions") or []
    return all(c["status"] == "True" for c in conditions if c["type"] == "Ready")


def rooms(nodes: Sequence[dict[str, Any]]) -> list[NodeRoom]:
    """Room of every node that takes new pods, as if it were empty."""
    return [r for r in map(room, nodes) if r is not None]


def place(needs: Sequence[PodRequest], free: list[NodeRoom]) -> Missing | None:
    """Put the pods into ``free``, which is changed; the first that finds no place, or None."""
    placed: Counter[str] = Counter()
    for need in sorted(needs, key=lambda n: (n.gpus, n.memory, n.cpu), reverse=True):
        for _ in range(need.count):
            target = next((r for r in free if r.takes(need)), None)
            if target is None:
                return Missing(need, placed[need.pool], len(free))
            target.cpu -= need.cpu
            target.memory -= need.memory
            target.gpus -= need.gpus
            placed[need.pool] += 1
    return None


def partly_taken(per_node: int, selector: dict[str, str], nodes: Sequence[dict[str, Any]]) -> str | None:
    """Message when a training pod of ``per_node`` GPUs could leave some of a node free: an engine that
    shares them sees all."""
    matching = [r for r in rooms(nodes) if selector.items() <= r.labels.items()]
    larger = next((r for r in matching if r.gpus > per_node), None)
    if larger is None:
        return None
    return (
        f"spec.mode=colocated: node {larger.name} has {larger.gpus} GPUs, and an engine there would see all, "
        f"not only the {per_node} of trainer.gpusPerNode: set trainer.gpusPerNode to {larger.gpus}, or "
        "choose other nodes by trainer.nodeSelector"
    )


def infeasible(needs: Sequence[PodRequest], nodes: Sequence[dict[str, Any]]) -> str | None:
    """Message with field, value and remedy when the pods can never fit, or None when they can."""
    missing = place(needs, rooms(nodes))
    if missing is None:
        return None
    field_name = missing.need.field_name
    return f"{missing.text('exist, even when empty')}: add nodes or lower {field_name}"
