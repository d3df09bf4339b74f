"""The controller's view of the rollout pool: discovery, weight versions, state of each engine."""

import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.common import tls
from grpo_worker.common.auth import pair_headers
from grpo_worker.common.clock import SYSTEM_CLOCK, Clock
from grpo_worker.common.patient_http import UNLIMITED, patient_transport
from grpo_worker.common.service_addresses import ServiceAddresses
from grpo_worker.common.weight_checksum import conflict
from grpo_worker.rollout.routing import EngineEntry, EngineTable, entry_of
from grpo_worker.rollout.sync_retries import SyncRetries

log = logging.getLogger(__name__)
AGENT_PORT = 9000
POLL_SECONDS = 0.5
_SERVED_POLL_SECONDS = 0.05  # between two looks at whether enough engines serve: the next step waits for it
_NAMED = 8  # engines that a message names


class SyncError(RuntimeError):
    """Too few engines reached the requested state; the message names them and the reason."""


class MixedWeightsError(RuntimeError):
    """Engines that report the same version hold different weights."""


@dataclass(frozen=True, slots=True)
class Target:
    """The version that the pool must serve, and the URLs of its slices by trainer rank."""

    version: int
    sources: dict[int, str]
    gang: str = ""  # identity of the trainer ranks that have delivered this version over links


class RolloutPool:
    """Discovers engines through the pool's headless service and keeps them at the target version.

    A thread polls all agents, so that engines that join late or restart also receive the target.
    """

    def __init__(
        self, service: str, min_available: int, size: int, writer: str, fp8: bool,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:  # fmt: skip
        """Start polling the engines behind ``service``.

        ``size``: engines of the whole pool. ``writer``: identity of this job towards the agents. ``fp8``:
        whether engines receive FP8 weights.
        """
        self.table = EngineTable()
        self.fp8 = fp8
        self.size = size
        self.attempt = 0  # of the job; agents refuse attempts older than the latest they have seen
        self._service = ServiceAddresses(service, AGENT_PORT)
        self._writer = writer
        self._min_available = min_available
        self._target: Target | None = None
        self._http = httpx.Client(timeout=5, transport=patient_transport(tls.pair()))
        self._clock = clock
        # Looks have threads of their own: requests of an update may all wait for slow engines.
        self._looks = ThreadPoolExecutor(32, thread_name_prefix="pool-look")
        self._threads = ThreadPoolExecutor(512, thread_name_prefix="pool")
        self._syncing: set[str] = set()
        self._silent: list[str] = []  # addresses of engines whose agents did not answer the last look
        self._retries: SyncRetries[Target] = SyncRetries()
        self._responses = 0  # of agents to POST requests
        self._lock = threading.Lock()
        threading.Thread(target=self._poll_forever, daemon=True, name="pool-poll").start()

    def hold(self) -> None:
        """Start no update until the next ``serve``: the current target is about to be replaced."""
        self._target = None

    def turn(self, parts: Sequence[str], timeout: float) -> None:
        """Make colocated engines hold exactly these ``parts`` of their GPU memory.

        Returns once ``minAvailable`` engines hold the parts, or, if ``parts`` is empty, once the engines of
        all pods have released their GPU memory. The server of an agent that does not answer may hold it, so
        that agent is waited for until its pod is gone. Raises SyncError after ``timeout`` seconds.
        """
        self.hold()
        deadline = self._clock.now() + timeout
        while True:
            entries = self.table.entries()
            settled = list(self._threads.map(lambda e: self._set_memory(e, parts, timeout), entries))
            late = [entry.name for entry, done in zip(entries, settled, strict=True) if not done]
            late += [f"the agent at {address}" for address in self._silent]
            enough = sum(settled) >= self._min_available if parts else not late
            if enough and entries:
                return
            if self._clock.now() > deadline:
                action = "resume" if parts else "release"
                raise SyncError(
                    f"engines did not {action} their GPU memory in {timeout:.0f} s: "
                    f"{late or 'no engine found'}"
                )
            self._clock.sleep(POLL_SECONDS)

    def _set_memory(self, engine: EngineEntry, parts: Sequence[str], timeout: float) -> bool:
        """Ask one agent to hold ``parts``; return whether its engine holds them now."""
        try:
            status = self._post(engine, "turn", timeout, {"parts": list(parts)})
        except SyncError as error:
            log.warning("%s", error)
            return False
        if status["attempt"] > self.attempt:
            raise SyncError(
                f"{engine.name} obeys attempt {status['attempt']} of this job, this is attempt {self.attempt}"
            )
        return bool(status.get("settled")) and "error" not in status

    def serves(self, version: int) -> bool:
        """Return whether ``minAvailable`` engines already serve the version."""
        return len(self.table.serving(version)) >= self._min_available

    def shortage(self, version: int) -> str:
        """Return "", or, if fewer than ``minAvailable`` engines serve ``version``, which do not and why."""
        if self.serves(version):
            return ""
        entries = self.table.entries()
        late = [e for e in entries if e.state != EngineState.SERVING or e.version != version]
        named = [f"{e.name} {e.state}" + self._why(e) for e in late[:_NAMED]]
        more = [f"and {len(late) - _NAMED} more"] if len(late) > _NAMED else []
        count = f"{len(entries) - len(late)} of minAvailable={self._min_available} engines"
        return f"{count} serve version {version}: {', '.join(named + more) or 'no engine found'}"

    def _why(self, engine: EngineEntry) -> str:
        """Return why an engine does not serve the target, in parentheses; "" if nothing is known."""
        target = self._target
        failures = self._retries.of(engine, target) if target else None
        count = f"{failures.count} updates failed, now {failures.pause:.0f} s apart" if failures else ""
        text = "; ".join(filter(None, (engine.reason, count)))
        return f" ({text})" if text else ""

    def serve(self, target: Target, timeout: float) -> dict[str, float]:
        """Bring the pool to ``target`` and wait until ``minAvailable`` engines serve it.

        Engines that fail stay STALE; the polling thread retries them. Returns, for each phase of an update,
        the seconds of the slowest engine. Raises SyncError when too few engines serve it ``timeout`` seconds
        after each engine's first update ended, or as soon as another target replaces this one, and
        MixedWeightsError.
        """
        self._target = target
        engines = [e for e in self.table.entries() if e.state != EngineState.RESTARTING]
        results = list(self._threads.map(lambda e: self._sync(e, target), engines))
        deadline = self._clock.now() + timeout
        while not self.serves(target.version):
            if self._target is not target:
                raise SyncError(f"version {target.version} is no longer the one to serve")
            if self._first_updates():  # agents bound an update by its progress
                deadline = self._clock.now() + timeout
            if self._clock.now() > deadline:
                raise SyncError(f"after {timeout:.0f} s, {self.shortage(target.version)}")
            self._clock.sleep(_SERVED_POLL_SECONDS)
        self._compare_checksums(target.version)
        timings = [r["seconds"] for r in results if r and "seconds" in r]
        phases = sorted({phase for seconds in timings for phase in seconds})
        return {
            f"timing_s/update_weights_{phase}": max(seconds.get(phase, 0.0) for seconds in timings)
            for phase in phases
        }

    def _first_updates(self) -> bool:
        """Return whether an engine is being updated that has not failed to take the target before.

        Retries have no end, so nobody waits for them without a limit.
        """
        target = self._target
        with self._lock:
            entries = [entry for entry in map(self.table.entry, self._syncing) if entry]
        return any(target is None or not self._retries.of(entry, target) for entry in entries)

    @contextmanager
    def reserved(self) -> Iterator[list[EngineEntry]]:
        """Reserve all reachable engines that are not being updated.

        The polling thread starts no update of them while the context is open.
        """
        with self._lock:
            mine = [e for e in self.table.reachable() if e.name not in self._syncing]
            self._syncing |= {e.name for e in mine}
        try:
            yield mine
        finally:
            with self._lock:
                self._syncing -= {e.name for e in mine}

    def ask(self, engine: EngineEntry, route: str, timeout: float, **body: Any) -> "Future[dict[str, Any]]":
        """POST to a route of an engine's agent; the result is its response, also stored in the table."""
        return self._threads.submit(self._post, engine, route, timeout, body)

    def _post(self, engine: EngineEntry, route: str, timeout: float, body: dict[str, Any]) -> dict[str, Any]:
        url = tls.url(engine.address, AGENT_PORT, f"/v1/{route}")
        body = {"writer": self._writer, "attempt": self.attempt, **body}
        try:
            response = self._http.post(url, json=body, timeout=timeout, headers=pair_headers())
            result: dict[str, Any] = response.json()
            if response.status_code == HTTPStatus.UNAUTHORIZED:
                raise ValueError(result["error"])
            self._responses += 1
            self.table.update(entry_of(result, engine.address, self._writer))
        except (httpx.HTTPError, ValueError) as error:
            self.table.suspect(engine.name, f"{route} failed: {error!r}")
            raise SyncError(f"{engine.name}: {error!r}") from error
        return result

    def model_configs(self, version: int) -> dict[str, dict[str, Any]]:
        """Return the config.json of each engine that serves ``version``.

        Engines that do not respond, because they are going down, are left out. Raises SyncError when no
        engine responds.
        """
        configs, problem = {}, "no engine found"
        for engine in self.table.serving(version):
            try:
                url = tls.url(engine.address, AGENT_PORT, "/v1/model")
                response = self._http.get(url, headers=pair_headers())
                response.raise_for_status()
                configs[engine.name] = dict(response.json())
            except (httpx.HTTPError, ValueError) as error:
                problem = repr(error)
                log.warning("%s does not report its model's config.json: %s", engine.name, problem)
        if not configs:
            raise SyncError(f"no engine reports its model's config.json: {problem}")
        return configs

    def _compare_checksums(self, version: int) -> None:
        sums = {e.name: e.checksum for e in self.table.serving(version)}
        if conflict(sums.values()):
            raise MixedWeightsError(f"engines hold different weights at version {version}: {sums}")

    def _sync(self, engine: EngineEntry, target: Target) -> dict[str, Any] | None:
        """Update one engine; return its agent's response, or None if it failed or is being updated."""
        with self._lock:
            if engine.name in self._syncing:
                return None
            self._syncing.add(engine.name)
        try:
            return self._update(engine, target)
        finally:
            with self._lock:
                self._syncing.discard(engine.name)

    def _update(self, engine: EngineEntry, target: Target) -> dict[str, Any] | None:
        """Try to update an engine, and note a failure; see ``_sync``."""
        try:
            body = {"version": target.version, "sources": target.sources, "gang": target.gang}
            result = self._post(engine, "sync", UNLIMITED, body)
        except SyncError as error:
            result = {"error": str(error)}
        if "error" in result:
            self._retries.failed(engine, target, self._clock.now())
            log.warning("sync of %s: %s", engine.name, result["error"])
            return None
        self._retries.succeeded(engine)
        return result

    def _poll_forever(self) -> None:
        while True:
            try:
                self._poll()
            except Exception:  # the thread must go on; the next poll may succeed
                log.exception("polling the rollout pool failed")
            self._clock.sleep(POLL_SECONDS)

    def _poll(self) -> None:
        """Refresh the table, and update engines that joined late or missed an update."""
        before, target = self._responses, self._target
        addresses = self._addresses()
        entries = [entry for entry in self._looks.map(self._status_of, addresses) if entry]
        self._silent = sorted(set(addresses) - {entry.address for entry in entries})
        if self._responses != before:
            return  # the response to a POST is newer than these entries
        self.table.replace(entries)
        for entry in entries:
            behind = entry.state in (EngineState.STALE, EngineState.SERVING)
            if not target or not behind or entry.version == target.version:
                continue
            if self._retries.due(entry, target, self._clock.now()):
                self._threads.submit(self._sync, entry, target)

    def _status_of(self, address: str) -> EngineEntry | None:
        try:
            response = self._http.get(tls.url(address, AGENT_PORT, "/v1/status"))
            return entry_of(response.json(), address, self._writer)
        except (httpx.HTTPError, ValueError):
            return None

    def _addresses(self) -> list[str]:
        return self._service()
