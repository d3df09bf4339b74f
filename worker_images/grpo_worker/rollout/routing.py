"""Which engine gets the next request (pure apart from its lock)."""

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from grpo_operator.api.v1alpha1.status import EngineState


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine as its agent last described it."""

    name: str
    address: str
    state: EngineState
    version: int | None
    since: str = ""
    restarts: int = 0
    checksum: str = ""
    reason: str = ""
    ranks: int = 1
    bucket_bytes: int = 0
    instance: str = ""  # of its agent
    silent: bool = False  # its scheduler leaves calls unanswered


class EngineTable:
    """Known engines; routes only to those that serve the wanted version."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._engines: dict[str, EngineEntry] = {}
        self._load: dict[str, int] = {}

    def replace(self, entries: list[EngineEntry]) -> None:
        """Take over a fresh look at all engines; those not in it are gone."""
        with self._lock:
            self._engines = {entry.name: entry for entry in entries}
            self._lock.notify_all()

    def update(self, entry: EngineEntry) -> None:
        with self._lock:
            self._engines[entry.name] = entry
            self._lock.notify_all()

    def suspect(self, name: str, reason: str) -> None:
        """Stop routing to an engine that failed a request, until its agent speaks again."""
        with self._lock:
            entry = self._engines.get(name)
            if entry:
                self._engines[name] = replace(
                    entry, state=EngineState.RESTARTING, version=None, reason=reason
                )

    def entries(self) -> list[EngineEntry]:
        with self._lock:
            return sorted(self._engines.values(), key=lambda entry: entry.name)

    def reachable(self) -> list[EngineEntry]:
        """Those that can take a version: the server is there and its scheduler answers."""
        there = (EngineState.STALE, EngineState.SERVING)
        return [entry for entry in self.entries() if entry.state in there and not entry.silent]

    def serving(self, version: int) -> list[EngineEntry]:
        with self._lock:
            return self._serving(version)

    def wait_serving(self, version: int, count: int, timeout: float) -> bool:
        """Wait until ``count`` engines serve ``version``; False when the time ran out."""
        with self._lock:
            return self._lock.wait_for(lambda: len(self._serving(version)) >= count, timeout)

    @contextmanager
    def lease(
        self, version: int, timeout: float, newer: bool = False, avoid: Collection[str] = ()
    ) -> Iterator[EngineEntry]:
        """The least loaded engine that serves ``version``, or with ``newer`` a later one; none of ``avoid``
        while there is another.

        Raises TimeoutError when none serves it within ``timeout`` seconds.
        """
        with self._lock:
            if not self._lock.wait_for(lambda: self._serving(version, newer), timeout):
                raise TimeoutError(f"no engine serves version {version} after {timeout:.0f} s")
            entry = min(
                self._serving(version, newer),
                key=lambda e: (e.name in avoid, self._load.get(e.name, 0), e.name),
            )
            self._load[entry.name] = self._load.get(entry.name, 0) + 1
        try:
            yield entry
        finally:
            with self._lock:
                self._load[entry.name] -= 1

    def _serving(self, version: int, newer: bool = False) -> list[EngineEntry]:
        serving = [e for e in self._engines.values() if e.state == EngineState.SERVING]
        last = float("inf") if newer else version
        return [e for e in serving if e.version is not None and version <= e.version <= last]
