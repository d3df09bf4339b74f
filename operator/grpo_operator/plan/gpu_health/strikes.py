"""Strikes against nodes with sick GPUs, and quarantine after the second one (pure).

A strike moves the GPU pods off a node. Only pods that started after a node's last strike count against it
again: the ones before are leaving, and several agents may report one fault.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from grpo_operator.api import names
from grpo_operator.api.gpu_messages import GpuFinding
from grpo_operator.api.messages import Message
from grpo_operator.plan.times import seconds_of

STRIKES = 2  # until a node is in quarantine


class Strike(Message):
    """One verdict against a node. ``at``: seconds since 1970. ``owners``: whose pods were there."""

    at: float
    reason: str
    text: str
    owners: tuple[str, ...] = ()


class NodeRecord(Message):
    """Memory of one node. ``tainted``: the taint of its quarantine has been seen on it."""

    strikes: tuple[Strike, ...] = ()
    quarantined: bool = False
    tainted: bool = False


class Evidence(NamedTuple):
    """Why a node is struck. ``started``: when the reporting pod was created, in seconds since 1970."""

    reason: str
    text: str
    started: float


def sick_gpu(finding: GpuFinding, started: float) -> Evidence:
    """Return the evidence of a finding about a GPU."""
    return Evidence(finding.reason, f"{finding.text} ({finding.gpu}, index {finding.index})", started)


Records = Mapping[str, NodeRecord]  # by node


@dataclass(frozen=True, slots=True)
class Limits:
    """``window``: seconds after which a strike is forgotten. ``share``: of nodes that may have one."""

    window: float = 86400.0
    share: float = 0.1

    def nodes(self, count: int) -> int:
        """Return how many of ``count`` nodes may have a strike at a time."""
        return max(1, int(self.share * count))


@dataclass(frozen=True, slots=True)
class Judged:
    """Outcome of a round. ``struck`` and ``spared``: node -> message; ``spared``: by the limit."""

    records: dict[str, NodeRecord]
    struck: dict[str, str] = field(default_factory=dict)
    spared: dict[str, str] = field(default_factory=dict)


def remembered(records: Records, nodes: Collection[str], now: float, limits: Limits) -> dict[str, NodeRecord]:
    """Return the records without strikes outside of the window and without nodes that are gone."""
    kept: dict[str, NodeRecord] = {}
    for node, record in records.items():
        if node not in nodes:
            continue
        strikes = tuple(s for s in record.strikes if record.quarantined or now - s.at < limits.window)
        if strikes or record.quarantined:
            kept[node] = record.updated(strikes=strikes)
    return kept


def judge(
    records: Records,
    sick: Mapping[str, Evidence],
    places: Mapping[str, Collection[str]],
    gpu_nodes: int,
    now: float,
    limits: Limits,
) -> Judged:
    """Judge the nodes with fresh evidence, in the order of their names.

    ``sick``: node -> evidence. ``places``: owner -> nodes with its pods. ``gpu_nodes``: their number
    in the cluster.
    """
    judged = Judged(dict(records))
    recent = {n: r.strikes[-1].owners for n, r in records.items() if now - r.strikes[-1].at < limits.window}
    for node in sorted(sick):
        before = judged.records.get(node, NodeRecord())
        owners = tuple(sorted(owner for owner, nodes in places.items() if node in nodes))
        reason, found, started = sick[node]
        text = f"node {node}: {found}"
        limit = "" if before.strikes else _limit(recent, owners, places, gpu_nodes, limits)
        if limit:
            judged.spared[node] = f"{text}: {limit}"
            continue
        # The API server's clock may be ahead: the reporting pod itself must not count again.
        strike = Strike(at=max(now, started), reason=reason, text=text, owners=owners)
        strikes = (*before.strikes, strike)[-STRIKES:]
        quarantined = before.quarantined or len(strikes) >= STRIKES
        recent[node] = owners
        judged.records[node] = before.updated(strikes=strikes, quarantined=quarantined)
        outcome = "the node is in quarantine" if quarantined else "its GPU pods are replaced"
        judged.struck[node] = f"{text}: strike {len(strikes)} of {STRIKES}, {outcome}"
    return judged


def _limit(
    recent: Mapping[str, Collection[str]], owners: Iterable[str], places: Mapping[str, Collection[str]],
    gpu_nodes: int, limits: Limits,
) -> str:  # fmt: skip
    """Return the limit that one more node would exceed, or "". An agent gone wild must not move every pod.

    ``recent``: node with a strike in the window -> the owners whose pods were there.
    """
    groups = [("the cluster", len(recent), gpu_nodes)]
    for owner in owners:
        struck = {node for node, whose in recent.items() if owner in whose}
        groups.append((owner, len(struck), len(struck | set(places[owner]))))
    for name, struck_count, count in groups:
        if struck_count >= limits.nodes(count):
            return (
                f"no pod is replaced, because {struck_count} of {count} GPU nodes of {name} have strikes, "
                f"the most that gpuHealth.maxNodesPercent={limits.share * 100:.0f} allows"
            )
    return ""


def fresh(pod: dict[str, Any], record: NodeRecord | None) -> bool:
    """Return whether a pod started after the last strike of its node, so that its report counts."""
    if record is None or not record.strikes:
        return True
    return seconds_of(pod["metadata"]["creationTimestamp"]) > record.strikes[-1].at


def to_replace(pods: Iterable[dict[str, Any]], records: Records) -> Iterator[dict[str, Any]]:
    """Yield the pods of trainers and engines that must leave their node because of its last strike."""
    for pod in pods:
        record = records.get(pod["spec"].get("nodeName") or "")
        pool = pod["metadata"]["labels"].get(names.POOL_LABEL)
        leaving = pod["metadata"].get("deletionTimestamp")
        if pool in (names.TRAINER, names.ROLLOUT) and not leaving and not fresh(pod, record):
            yield pod


def sick_nodes(records: Records, owner: str) -> tuple[str, ...]:
    """Return the last strikes of the nodes that struck an owner, for its status."""
    struck = {
        node: record for node, record in records.items() if any(owner in s.owners for s in record.strikes)
    }
    return tuple(
        struck[node].strikes[-1].text + ("; in quarantine" if struck[node].quarantined else "")
        for node in sorted(struck)
    )
