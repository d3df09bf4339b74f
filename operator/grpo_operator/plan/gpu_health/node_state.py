"""Condition and taint that a node should have because of its GPUs (pure)."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from grpo_operator.api.v1alpha1.scheduling import SchedulingSpec
from grpo_operator.plan.gpu_health.strikes import NodeRecord, Records

CONDITION = "GRPOGPUHealthy"
TAINT = "rl.grpo.dev/gpu-quarantine"
_HOSTNAME = "kubernetes.io/hostname"
_Node = dict[str, Any]


def condition_due(
    node: _Node, record: NodeRecord | None, healthy: Collection[str], now: str
) -> dict[str, Any] | None:
    """Return the condition to write, or None when the node has it or needs none.

    It appears with a first strike and becomes True again when an agent that started later finds the GPUs
    healthy, or when the strikes are forgotten. ``healthy``: names of the nodes with such an agent.
    """
    old = next((c for c in node["status"].get("conditions") or [] if c["type"] == CONDITION), None)
    if (
        record is not None
        and record.strikes
        and (record.quarantined or node["metadata"]["name"] not in healthy)
    ):
        last = record.strikes[-1]
        status, reason, message = "False", last.reason, last.text
    elif old is not None:
        status, reason, message = "True", "NoSickGpu", "no agent of a GRPO job reports a sick GPU"
    else:
        return None
    if old is not None and (old["status"], old["reason"], old.get("message")) == (status, reason, message):
        return None
    since = old["lastTransitionTime"] if old is not None and old["status"] == status else now
    return {
        "type": CONDITION,
        "status": status,
        "reason": reason,
        "message": message,
        "lastTransitionTime": since,
        "lastHeartbeatTime": now,
    }


def is_tainted(node: _Node) -> bool:
    """Return whether the node has the taint of the quarantine."""
    return any(taint["key"] == TAINT for taint in node["spec"].get("taints") or [])


def tainted(node: _Node) -> list[dict[str, Any]]:
    """Return all taints of the node with that of the quarantine."""
    return [*(node["spec"].get("taints") or []), {"key": TAINT, "effect": "NoSchedule"}]


def with_taints_seen(records: Records, nodes: Iterable[_Node]) -> dict[str, NodeRecord]:
    """Return the records after a look at the taints: who removes the taint lifts the quarantine."""
    seen = {node["metadata"]["name"]: is_tainted(node) for node in nodes}
    lifted = {n for n, record in records.items() if record.tainted and not seen.get(n, False)}
    return {
        node: record.updated(tainted=record.tainted or (record.quarantined and seen.get(node, False)))
        for node, record in records.items()
        if node not in lifted
    }


def avoided_hosts(
    records: Records, nodes: Iterable[_Node], scheduling: SchedulingSpec, taints: bool
) -> tuple[str, ...]:
    """Return the hostnames that the pods of a job must avoid by affinity, because no taint keeps them off.

    ``taints``: whether the operator taints nodes.
    """
    if taints and not _tolerates(scheduling):
        return ()
    labels = {n["metadata"]["name"]: n["metadata"].get("labels") or {} for n in nodes}
    quarantined = sorted(name for name, record in records.items() if record.quarantined)
    return tuple(hostname(name, labels.get(name, {})) for name in quarantined)


def hostname(node: str, labels: Mapping[str, str]) -> str:
    """Return the hostname of a node, by which an affinity selects it."""
    return labels.get(_HOSTNAME, node)


def _tolerates(scheduling: SchedulingSpec) -> bool:
    """Return whether the job's pods tolerate the taint, which has no value."""
    return any(
        t.key in ("", TAINT)
        and (t.operator == "Exists" or (t.key == TAINT and not t.value))
        and t.effect in ("", "NoSchedule")
        for t in scheduling.tolerations
    )
