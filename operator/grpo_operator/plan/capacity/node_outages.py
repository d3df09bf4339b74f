"""Outages of nodes, and the pods that cannot be deleted because of them (pure).

The kubelet of a node without power confirms no deletion. A pod that Kubernetes deletes there stays
Terminating, and KubeRay, which counts it, creates no other one. The operator therefore deletes such pods
without confirmation. Processes that still run on a node that is only cut off can do no harm: the next
attempt fences them off.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.plan.times import seconds_of

CONFIRM_SECONDS = 30.0  # for a kubelet that still reports to end a pod after its grace period
# kube-controller-manager evicts no pods from a zone with such a share of nodes that do not report
# (--unhealthy-zone-threshold): then the network of the control plane is more likely to be at fault.
_PARTITION_SHARE, _PARTITION_NODES = 0.55, 3
_MOST = 3  # nodes quoted in one message
_Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Outage:
    """A node that is not Ready.

    ``silent``: its kubelet has stopped reporting. ``seconds``: for how long the operator has seen it like
    that. ``since``: time of the transition on the cluster's clock.
    """

    node: str
    silent: bool
    seconds: float
    since: str
    message: str

    @property
    def text(self) -> str:
        """Return the outage for a condition message. It is the same as long as the outage lasts."""
        if self.silent:
            return f"node {self.node} has not reported since {self.since}"
        return f"node {self.node} is not ready since {self.since}: {self.message}".removesuffix(": ")


Outages = Mapping[str, Outage]  # by name of the node


def readiness(node: _Object) -> _Object | None:
    """Return the node's condition Ready unless it is true."""
    conditions = node["status"].get("conditions") or []
    return next((c for c in conditions if c["type"] == "Ready" and c["status"] != "True"), None)


def is_silent(condition: _Object | None) -> bool:
    """Return whether a node with this condition has stopped reporting."""
    return condition is not None and condition["status"] == "Unknown"


def partition(nodes: Collection[_Object]) -> str:
    """Return why no node counts as lost, or "": too many are silent at once."""
    silent = sum(is_silent(readiness(node)) for node in nodes)
    if silent < _PARTITION_NODES or silent < _PARTITION_SHARE * len(nodes):
        return ""
    share = f"{silent} of {len(nodes)} nodes do not report"
    return f"{share}, so the control plane may be cut off: no pod is replaced"


def unconfirmed(
    pods: Iterable[_Object], outages: Outages, eviction_seconds: Mapping[str, int], now: float
) -> Iterator[_Object]:
    """Yield the pods that must be deleted without confirmation.

    On a silent node these are all pods, after ``eviction_seconds`` of their pool. A kubelet that still
    reports ends pods itself, unless it is broken: it gets ``CONFIRM_SECONDS`` more for each deletion.
    """
    for pod in pods:
        outage = outages.get(pod["spec"].get("nodeName") or "")
        if outage is None or outage.seconds < eviction_seconds[_pool(pod)]:
            continue
        ends = pod["metadata"].get("deletionTimestamp")
        if outage.silent or (ends and now >= seconds_of(ends) + CONFIRM_SECONDS):
            yield pod


def awaited(pods: Iterable[_Object], outages: Outages, eviction_seconds: Mapping[str, int]) -> set[str]:
    """Return the nodes in an outage whose pods are not replaced yet, because the nodes may come back."""
    nodes = set()
    for pod in pods:
        outage = outages.get(pod["spec"].get("nodeName") or "")
        if outage is not None and outage.seconds < eviction_seconds[_pool(pod)]:
            nodes.add(outage.node)
    return nodes


def as_ready(nodes: Iterable[_Object], names_of: Collection[str]) -> list[_Object]:
    """Return the nodes, of which those named count as Ready."""
    return [_ready(node) if node["metadata"]["name"] in names_of else node for node in nodes]


def problem(outages: Iterable[Outage], partitioned: str) -> str:
    """Return a message about the outages, or ""."""
    ordered = sorted(outages, key=lambda outage: (outage.since, outage.node))
    texts = [outage.text for outage in ordered[:_MOST]]
    if len(ordered) > _MOST:
        texts.append(f"and {len(ordered) - _MOST} more nodes")
    return "; ".join([*texts, *([partitioned] if texts and partitioned else [])])


def eviction_seconds(spec: GRPOJobSpec, engines: RolloutTemplate) -> dict[str, int]:
    """Return the seconds after which pods on an unreachable node are replaced, by pool."""
    pools = {
        names.HEAD: spec.controller, names.CONTROLLER: spec.controller, names.TRAINER: spec.trainer,
        names.ROLLOUT: engines, names.STORE_REMOVAL: spec.controller,
    }  # fmt: skip
    return {name: spec.scheduling.eviction_seconds_of(pool) for name, pool in pools.items()}


def _ready(node: _Object) -> _Object:
    others = [c for c in node["status"].get("conditions") or [] if c["type"] != "Ready"]
    return node | {"status": node["status"] | {"conditions": others}}


def _pool(pod: _Object) -> str:
    return str(pod["metadata"]["labels"][names.POOL_LABEL])
