"""Rounds in which sick GPUs become strikes, moved pods, node conditions and quarantine.

Everything is decided from the ledger and the cluster, so a round that fails halfway, or an operator that
restarts, goes on with the next one. A strike is written before anything is done about it, and the pods leave
one round later, when the taint or the changed pod template keeps their successors off the node.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from grpo_operator.api.gpu_messages import GpuReport, Severity
from grpo_operator.api.names import Owner
from grpo_operator.apply.gpu_ledger import GpuLedger
from grpo_operator.apply.writer import Writer
from grpo_operator.handlers.background import succeeds
from grpo_operator.handlers.owner_calls import OwnerCalls
from grpo_operator.handlers.reconcilers.context import now as kubernetes_time
from grpo_operator.observe.cache import Cache
from grpo_operator.observe.gpu_poller import GpuClient, gpu_reports
from grpo_operator.plan.capacity.feasibility import GPU
from grpo_operator.plan.gpu_health import node_state, strikes
from grpo_operator.plan.gpu_health.slow_ranks import REASON, slow_nodes
from grpo_operator.plan.status.events import Event
from grpo_operator.plan.times import seconds_of
from grpo_operator.settings import GpuHealthSettings

log = logging.getLogger(__name__)
SECONDS = 10.0  # between two rounds
_Reports = list[tuple[dict[str, Any], GpuReport]]


class GpuHealth:
    """The rounds. ``changed``: called with the owners to reconcile when a node's quarantine changes."""

    def __init__(
        self, cache: Cache, client: GpuClient, writer: Writer, ledger: GpuLedger, settings: GpuHealthSettings,
        changed: Callable[[Iterable[Owner]], None], now: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self._cache, self._client, self._writer, self._ledger = cache, client, writer, ledger
        self._settings, self._changed, self._now = settings, changed, now
        self._limits = strikes.Limits(settings.window_hours * 3600, settings.max_nodes_percent / 100)
        self._loaded = asyncio.Event()
        self._deletions, self._events = OwnerCalls("deleting pods of sick GPUs"), OwnerCalls("GPU events")
        self._spared: set[str] = set()  # nodes about which the limit has been reported

    async def load(self) -> None:
        """Read the ledger before anything is reconciled; ``run`` starts then. Raises ApiException."""
        if self._settings.enabled:
            self._cache.gpu_records = await self._ledger.read()
        self._loaded.set()

    async def run(self) -> None:
        """Make rounds until cancelled, starting once the cache is complete and the ledger is loaded.

        With a partial cache the records of nodes that are not in it yet would be forgotten.
        """
        await self._loaded.wait()
        while self._settings.enabled:
            await asyncio.sleep(SECONDS)
            await succeeds("the round of GPU health", self.round)
        await asyncio.Event().wait()

    async def round(self) -> None:
        """Make one round."""
        cache, now = self._cache, self._now()
        before = await self._ledger.read()
        records = node_state.with_taints_seen(before, cache.nodes)
        names = {node["metadata"]["name"] for node in cache.nodes}
        records = strikes.remembered(records, names, now, self._limits)
        places = {owner: self._gpu_nodes(owner) for owner in cache.owners()}
        sick_pods = {owner: list(strikes.to_replace(cache.pods_of(owner), records)) for owner in places}
        leaving = {owner: partial(self._delete, pods) for owner, pods in sick_pods.items() if pods}
        await self._deletions.run(leaving)
        reports = await gpu_reports(self._client, (p for owner in places for p in cache.pods_of(owner)))
        counted = [(p, r) for p, r in reports if strikes.fresh(p, records.get(p["spec"]["nodeName"]))]
        sick = self._slow(places, records) | _sick(counted)
        texts = {owner.text: nodes for owner, nodes in places.items()}
        judged = strikes.judge(records, sick, texts, self._gpu_node_count(), now, self._limits)
        if judged.records != before:
            await self._ledger.write(judged.records)
        self._publish(judged.records)
        await self._report(judged, places, sick)
        healthy = {p["spec"]["nodeName"] for p, _ in counted} - sick.keys()
        await self._mark_nodes(judged.records, healthy)

    async def _delete(self, pods: list[dict[str, Any]]) -> None:
        for pod in pods:
            await self._writer.delete_pod(pod)

    def _publish(self, records: strikes.Records) -> None:
        if records != self._cache.gpu_records:
            self._cache.gpu_records = records
            self._changed(self._cache.owners())

    def _slow(self, places: Iterable[Owner], records: strikes.Records) -> dict[str, strikes.Evidence]:
        """Return the evidence from the stragglers of all jobs."""
        cache, found = self._cache, dict[str, strikes.Evidence]()
        for owner in places:
            found |= slow_nodes(cache.owner(owner), cache.pods_of(owner), records)
        return found

    async def _report(
        self, judged: strikes.Judged, places: Mapping[Owner, set[str]], sick: Mapping[str, strikes.Evidence]
    ) -> None:
        """Write an event on each owner with pods on a node that was struck, or spared for the first time."""
        spared = {node: text for node, text in judged.spared.items() if node not in self._spared}
        self._spared = set(judged.spared)
        events = [
            (node, Event("StragglerReplaced" if sick[node].reason == REASON else "GpuSick", text, True))
            for node, text in judged.struck.items()
        ]
        events += [(node, Event("GpuSickNotReplaced", text, True)) for node, text in spared.items()]
        for _, event in events:
            log.warning("%s: %s", event.reason, event.message)
        due = {owner: [event for node, event in events if node in nodes] for owner, nodes in places.items()}
        await self._events.run(
            {owner: partial(self._write_events, owner, own) for owner, own in due.items() if own}
        )

    async def _write_events(self, owner: Owner, events: list[Event]) -> None:
        for event in events:
            obj = self._cache.owner(owner)
            if obj is not None:
                await self._writer.event(obj, *event)

    async def _mark_nodes(self, records: strikes.Records, healthy: set[str]) -> None:
        for node in self._cache.nodes:
            record = records.get(node["metadata"]["name"])
            if self._settings.node_conditions:
                due = node_state.condition_due(node, record, healthy, kubernetes_time())
                if due:
                    await self._writer.node_condition(node, due)
            quarantined = record is not None and record.quarantined
            if self._settings.taints and quarantined and not node_state.is_tainted(node):
                await self._writer.node_taints(node, node_state.tainted(node))

    def _gpu_nodes(self, owner: Owner) -> set[str]:
        pods = self._cache.pods_of(owner)
        return {p["spec"]["nodeName"] for p in pods if p["spec"].get("gpus") and p["spec"].get("nodeName")}

    def _gpu_node_count(self) -> int:
        return sum(GPU in (node["status"].get("allocatable") or {}) for node in self._cache.nodes)


def _sick(reports: _Reports) -> dict[str, strikes.Evidence]:
    """Return the first finding of a sick GPU on each node."""
    found: dict[str, strikes.Evidence] = {}
    for pod, report in reports:
        for finding in report.findings:
            if finding.severity is Severity.SICK:
                started = seconds_of(pod["metadata"]["creationTimestamp"])
                found.setdefault(pod["spec"]["nodeName"], strikes.sick_gpu(finding, started))
    return found
