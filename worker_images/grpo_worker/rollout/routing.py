"""Table of the known engines (pure apart from its lock)."""

import threading
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from grpo_operator.api.messages import AgentStatus
from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.common.versions import Versions


class Life(NamedTuple):
    """Identity of an engine's server: it changes when the server or its pod is replaced."""

    name: str
    address: str
    instance: str
    restarts: int


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """State of an engine as its agent last reported it."""

    name: str
    address: str
    state: EngineState
    version: int | None
    since: str = ""
    restarts: int = 0
    checksum: str = ""
    reason: str = ""
    ranks: int = 1
    hosts: int = 1
    bucket_bytes: int = 0
    instance: str = ""  # identity of the agent process
    unresponsive: bool = False  # the engine's scheduler does not answer calls
    versions: Versions = Versions()  # of its image

    @property
    def life(self) -> Life:
        """Identity of the server behind this entry."""
        return Life(self.name, self.address, self.instance, self.restarts)


def entry_of(answer: dict[str, Any], address: str, writer: str) -> EngineEntry:
    """Convert the status of the agent at ``address``. Raises ValueError for another kind of answer.

    An engine that serves the weights of another job than ``writer`` is STALE for this one.
    """
    status = AgentStatus.model_validate(answer)
    state, version = status.state, status.weight_version
    if status.writer != writer and state == EngineState.SERVING:
        state, version = EngineState.STALE, None
    return EngineEntry(
        name=status.name,
        address=address,
        state=state,
        version=version,
        since=status.since,
        restarts=status.restarts,
        checksum=status.checksum,
        reason=status.reason,
        ranks=status.ranks,
        hosts=max(len(status.hosts), 1),
        bucket_bytes=status.bucket_bytes,
        instance=status.instance,
        unresponsive=status.silent,
        versions=Versions.of(status.versions),
    )


class EngineTable:
    """Known engines, their state and the weight version that each serves. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._engines: dict[str, EngineEntry] = {}

    def replace(self, entries: list[EngineEntry]) -> None:
        """Replace all entries; engines without an entry have left the pool."""
        with self._lock:
            self._engines = {entry.name: entry for entry in entries}
            self._lock.notify_all()

    def update(self, entry: EngineEntry) -> None:
        """Add or replace the entry of one engine."""
        with self._lock:
            self._engines[entry.name] = entry
            self._lock.notify_all()

    def suspect(self, name: str, reason: str) -> None:
        """Stop routing to an engine that failed a request until its agent reports a new state."""
        with self._lock:
            entry = self._engines.get(name)
            if entry:
                self._engines[name] = _suspected(entry, reason)

    def trust(self, entry: EngineEntry, reason: str) -> None:
        """Route to an engine again that was suspected for ``reason``, if no other state came since.

        ``entry``: its entry before that.
        """
        with self._lock:
            current = self._engines.get(entry.name)
            if current is not None and current == _suspected(entry, reason):
                self._engines[entry.name] = entry
                self._lock.notify_all()

    def entry(self, name: str) -> EngineEntry | None:
        """Return the entry of an engine; None if it is not in the pool."""
        with self._lock:
            return self._engines.get(name)

    def entries(self) -> list[EngineEntry]:
        """Return all entries, ordered by name."""
        with self._lock:
            return sorted(self._engines.values(), key=lambda entry: entry.name)

    def reachable(self) -> list[EngineEntry]:
        """Return the engines that can receive weights: the server is up and its scheduler responds."""
        up = (EngineState.STALE, EngineState.SERVING)
        return [entry for entry in self.entries() if entry.state in up and not entry.unresponsive]

    def serving(self, version: int, newer: bool = False) -> list[EngineEntry]:
        """Return the engines that serve exactly ``version``, or, with ``newer``, also a later one."""
        with self._lock:
            return self._serving(version, newer)

    def wait_serving(self, version: int, count: int, timeout: float) -> bool:
        """Wait until ``count`` engines serve ``version``; return False after ``timeout`` seconds."""
        with self._lock:
            return self._lock.wait_for(lambda: len(self._serving(version)) >= count, timeout)

    def _serving(self, version: int, newer: bool = False) -> list[EngineEntry]:
        serving = [e for e in self._engines.values() if e.state == EngineState.SERVING]
        last = float("inf") if newer else version
        return [e for e in serving if e.version is not None and version <= e.version <= last]


def _suspected(entry: EngineEntry, reason: str) -> EngineEntry:
    return replace(entry, state=EngineState.RESTARTING, version=None, reason=reason)
