"""Checks whether pods fit on the cluster's nodes (pure).

First-fit decreasing. For feasibility the nodes count as empty: a job that does not fit then can never start,
and gets no pods; for a job that does fit, the scheduler decides the rest.
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
    """Resource request of ``count`` equal pods of one pool: cpu in cores, memory in bytes, per pod.

    ``field_name``: the field of the spec that sets ``count``. ``host_network``: the pods listen on
    fixed ports of their host.
    """

    pool: str
    field_name: str
    count: int
    cpu: float
    memory: int
    gpus: int = 0
    node_selector: dict[str, str] = field(default_factory=dict)
    host_network: bool = False


@dataclass(slots=True)
class NodeCapacity:
    """Free capacity of a node; ``place`` subtracts from it. ``ports``: no pod uses the host's network yet."""

    name: str
    cpu: float
    memory: int
    gpus: int
    labels: dict[str, str]
    ports: bool = True

    def fits(self, request: PodRequest) -> bool:
        """Return whether one pod of the request fits."""
        return (
            request.node_selector.items() <= self.labels.items()
            and self.cpu >= request.cpu
            and self.memory >= request.memory
            and self.gpus >= request.gpus
            and (self.ports or not request.host_network)
        )

    def take(self, request: PodRequest) -> None:
        """Subtract one pod of the request."""
        self.cpu -= request.cpu
        self.memory -= request.memory
        self.gpus -= request.gpus
        self.ports = self.ports and not request.host_network


def quantity(text: str) -> float:
    """Return a Kubernetes quantity as a number: ``500m`` -> 0.5, ``2Gi`` -> 2147483648, ``1k`` -> 1000.

    Raises ValueError for any other text.
    """
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a Kubernetes quantity")
    return float(match[1]) * _UNITS[match[2]]


def node_capacity(node: dict[str, Any]) -> NodeCapacity | None:
    """Return the allocatable capacity of a node; None when it accepts no new pods."""
    if node["spec"].get("unschedulable") or not _ready(node):
        return None
    allocatable = node["status"].get("allocatable") or {}
    return NodeCapacity(
        name=node["metadata"]["name"],
        cpu=quantity(allocatable.get("cpu", "0")),
        memory=int(quantity(allocatable.get("memory", "0"))),
        gpus=int(quantity(allocatable.get(GPU, "0"))),
        labels=node["metadata"].get("labels") or {},
    )


@dataclass(frozen=True, slots=True)
class Missing:
    """The first pod that fits on no node.

    ``placed``: pods of its pool that fit. ``nodes``: number of nodes, of which ``selected`` have the labels
    of its nodeSelector.
    """

    request: PodRequest
    placed: int
    nodes: int
    selected: int

    def text(self, qualifier: str) -> str:
        """Return a message with field, value and capacity, which ends with ``qualifier``."""
        request = self.request
        each = f"{request.cpu:g} CPU, {request.memory / 2**30:.1f} GiB"
        if request.gpus:
            each += f", {request.gpus} GPUs"
        if request.host_network:
            each += ", one on a node because of scheduling.rdma.hostNetwork"
        selector = ", ".join(f"{key}={value}" for key, value in request.node_selector.items())
        which = (
            f", of which {self.selected} have the labels of nodeSelector ({selector})," if selector else ""
        )
        return (
            f"{request.field_name}={request.count}: only {self.placed} of {request.count} {request.pool} "
            f"pods ({each} each) fit on the {self.nodes} schedulable nodes of this cluster{which} {qualifier}"
        )

    @property
    def remedy(self) -> str:
        if self.request.node_selector and not self.selected:
            return "label nodes, or correct nodeSelector"
        return f"add nodes or lower {self.request.field_name}"


def _ready(node: dict[str, Any]) -> bool:
    conditions = node["status"].get("conditions") or []
    return all(c["status"] == "True" for c in conditions if c["type"] == "Ready")


def node_capacities(nodes: Sequence[dict[str, Any]]) -> list[NodeCapacity]:
    """Return the capacity of every node that accepts new pods, as if it were empty."""
    return [capacity for capacity in map(node_capacity, nodes) if capacity is not None]


def place(requests: Sequence[PodRequest], free: list[NodeCapacity]) -> Missing | None:
    """Subtract all pods from ``free``, first-fit decreasing.

    Returns the first pod that fits on no node, or None.
    """
    placed: Counter[str] = Counter()
    for request in sorted(requests, key=lambda r: (r.gpus, r.memory, r.cpu), reverse=True):
        for _ in range(request.count):
            node = next((node for node in free if node.fits(request)), None)
            if node is None:
                selected = sum(request.node_selector.items() <= one.labels.items() for one in free)
                return Missing(request, placed[request.pool], len(free), selected)
            node.take(request)
            placed[request.pool] += 1
    return None


def oversized_node(per_node: int, selector: dict[str, str], nodes: Sequence[dict[str, Any]]) -> str | None:
    """Return a message when a node has more GPUs than a colocated training pod, else None.

    ``per_node``: GPUs of the training pod. A colocated engine requests no GPUs and sees all GPUs of its
    node, so the trainers must own them all.
    """
    matching = [node for node in node_capacities(nodes) if selector.items() <= node.labels.items()]
    larger = next((node for node in matching if node.gpus > per_node), None)
    if larger is None:
        return None
    return (
        f"spec.mode=colocated: node {larger.name} has {larger.gpus} GPUs, and an engine there would use all "
        f"of them, not only the {per_node} of trainer.gpusPerNode: set trainer.gpusPerNode to {larger.gpus}, "
        "or select other nodes with trainer.nodeSelector"
    )


def infeasible(requests: Sequence[PodRequest], nodes: Sequence[dict[str, Any]]) -> str | None:
    """Return a message with field, value and remedy when the pods can never fit, else None."""
    missing = place(requests, node_capacities(nodes))
    if missing is None:
        return None
    return f"{missing.text('even when the nodes are empty')}: {missing.remedy}"
