"""Measures how long nodes have not been Ready, on the operator's own clock."""

import time
from collections.abc import Callable, Iterable
from typing import Any

from grpo_operator.observe.cache import Cache
from grpo_operator.plan.capacity.node_outages import Outage, is_silent, readiness


class OutageWatch:
    """Remembers when each outage was first seen.

    The transition time of a condition comes from another machine's clock, which may be wrong by more than
    an outage may last, so it only tells outages apart: a node that was Ready in between starts again at 0.
    """

    def __init__(self, cache: Cache, now: Callable[[], float] = time.monotonic) -> None:
        self._cache, self._now = cache, now
        self._seen: dict[
            str, tuple[tuple[str, ...], float]
        ] = {}  # node -> identity of the outage, first look

    def outages(self, pods: Iterable[dict[str, Any]]) -> dict[str, Outage]:
        """Return the outages of the nodes of these pods by node."""
        self._forget_ended()
        hosts = {pod["spec"].get("nodeName") for pod in pods}
        found = (self._outage(host) for host in sorted(filter(None, hosts)))
        return {outage.node: outage for outage in found if outage}

    def _forget_ended(self) -> None:
        nodes = {name: self._cache.node(name) for name in self._seen}
        for name, node in nodes.items():
            if node is None or readiness(node) is None:
                del self._seen[name]

    def _outage(self, name: str) -> Outage | None:
        node = self._cache.node(name)
        condition = readiness(node) if node else None
        if node is None or condition is None:
            return None
        since = condition.get("lastTransitionTime") or ""
        identity, now = (node["metadata"].get("uid", ""), condition["status"], since), self._now()
        if name not in self._seen or self._seen[name][0] != identity:
            self._seen[name] = identity, now
        seconds = now - self._seen[name][1]
        return Outage(name, is_silent(condition), seconds, since, condition.get("message") or "")
