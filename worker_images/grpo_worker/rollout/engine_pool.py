"""The rollout pool as the controller sees it: discovery, weights, state of each engine."""

import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.common.auth import headers
from grpo_worker.rollout.routing import EngineEntry, EngineTable

log = logging.getLogger(__name__)
AGENT_PORT = 9000
LOOK_SECONDS = 0.5


class SyncError(RuntimeError):
    """Too few engines hold the version; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Target:
    """The version that the pool must serve, and where its slices are (rank -> URL)."""

    version: int
    sources: dict[int, str]
    link: str = ""  # by which engines have taken it already


class RolloutPool:
    """Finds engines by the pool's headless service and keeps all of them at the target. ``fp8``: the form
    in which they take weights."""

    def __init__(self, service: str, min_available: int, sync_timeout: float, writer: str, fp8: bool) -> None:
        self.table = EngineTable()
        self.fp8 = fp8
        self.attempt = 0  # of the job; agents refuse an older one than they have seen
        self._service = service
        self._writer = writer
        self._min_available = min_available
        self._sync_timeout = sync_timeout
        self._target: Target | None = None
        self._http = httpx.Client(timeout=5)
        self._threads = ThreadPoolExecutor(32, thread_name_prefix="pool")
        self._syncing: set[str] = set()
        self._synced = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._look_forever, daemon=True, name="pool-look").start()

    def hold(self) -> None:
        """Bring no engine to any version until the next ``serve``: another one is under way."""
        self._target = None

    def turn(self, parts: Sequence[str], timeout: float) -> None:
        """Let engines hold these ``parts`` of the memory of GPUs that they share with trainers.

        Returns once ``minAvailable`` engines hold them; without any: once no engine holds any. Raises
        SyncError after ``timeout`` seconds.
        """
        self.hold()
        deadline = time.monotonic() + timeout
        while True:
            entries = self.table.entries()
            told = list(self._threads.map(lambda entry: self._turned(entry, parts, timeout), entries))
            settled = sum(told)
            enough = settled >= self._min_available if parts else settled == len(entries)
            if enough and entries:
                return
            if time.monotonic() > deadline:
                late = [entry.name for entry, there in zip(entries, told, strict=True) if not there]
                what = "take their" if parts else "leave the"
                raise SyncError(f"engines do not {what} GPUs in {timeout:.0f} s: {late or 'no engine found'}")
            time.sleep(LOOK_SECONDS)

    def _turned(self, engine: EngineEntry, parts: Sequence[str], timeout: float) -> bool:
        try:
            told = self._post(engine, "turn", timeout, {"parts": list(parts)})
        except SyncError as error:
            log.warning("%s", error)
            return False
        if told["attempt"] > self.attempt:
            raise SyncError(
                f"{engine.name}: attempt {told['attempt']} of this job has it, this is {self.attempt}"
            )
        return bool(told.get("settled")) and "error" not in told

    def serves(self, version: int) -> bool:
        """Do ``minAvailable`` engines serve the version already?"""
        return self.table.wait_serving(version, self._min_available, 0)

    def serve(self, target: Target, timeout: float) -> dict[str, float]:
        """Bring the pool to ``target``; return once ``minAvailable`` engines serve it.

        Engines that fail are left STALE and retried by the watching thread. Returns the seconds
        of the slowest engine's phases. Raises SyncError when too few commit in ``timeout``.
        """
        self._target = target
        engines = [e for e in self.table.entries() if e.state != EngineState.RESTARTING]
        results = list(self._threads.map(lambda e: self._sync(e, target), engines))
        if not self.table.wait_serving(target.version, self._min_available, timeout):
            states = ", ".join(f"{e.name} {e.state} {e.reason}" for e in self.table.entries())
            raise SyncError(
                f"fewer than minAvailable={self._min_available} engines took version "
                f"{target.version} in {timeout:.0f} s: {states or 'no engine found'}"
            )
        self._compare_checksums(target.version)
        told = [r["seconds"] for r in results if r and "seconds" in r]
        phases = sorted({phase for seconds in told for phase in seconds})
        return {
            f"timing_s/update_weights_{phase}": max(seconds.get(phase, 0.0) for seconds in told)
            for phase in phases
        }

    @contextmanager
    def reserved(self) -> Iterator[list[EngineEntry]]:
        """The engines that are there, answer, and take no version just now; nobody else updates them
        meanwhile."""
        with self._lock:
            mine = [e for e in self.table.reachable() if e.name not in self._syncing]
            self._syncing |= {e.name for e in mine}
        try:
            yield mine
        finally:
            with self._lock:
                self._syncing -= {e.name for e in mine}

    def ask(self, engine: EngineEntry, what: str, timeout: float, **body: Any) -> "Future[dict[str, Any]]":
        """POST to an engine's agent, and note what it says of the engine; its answer."""
        return self._threads.submit(self._post, engine, what, timeout, body)

    def _post(self, engine: EngineEntry, what: str, timeout: float, body: dict[str, Any]) -> dict[str, Any]:
        url = f"http://{engine.address}:{AGENT_PORT}/v1/{what}"
        body = {"writer": self._writer, "attempt": self.attempt, **body}
        try:
            response = self._http.post(url, json=body, timeout=timeout, headers=headers())
            result: dict[str, Any] = response.json()
            if response.status_code == HTTPStatus.UNAUTHORIZED:
                raise ValueError(result["error"])
            self._synced += 1
            self.table.update(self._entry(engine.address, result))
        except (httpx.HTTPError, ValueError) as error:
            self.table.suspect(engine.name, f"{what} failed: {error!r}")
            raise SyncError(f"{engine.name}: {error!r}") from error
        return result

    def model_configs(self, version: int) -> dict[str, dict[str, Any]]:
        """config.json of the engines that serve ``version``, but for those that are just going down.

        Raises SyncError when none says it.
        """
        configs, problem = {}, "no engine found"
        for engine in self.table.serving(version):
            try:
                response = self._http.get(f"http://{engine.address}:{AGENT_PORT}/v1/model", headers=headers())
                response.raise_for_status()
                configs[engine.name] = dict(response.json())
            except (httpx.HTTPError, ValueError) as error:
                problem = repr(error)
                log.warning("%s does not say which model it runs: %s", engine.name, problem)
        if not configs:
            raise SyncError(f"no engine says which model it runs: {problem}")
        return configs

    def _compare_checksums(self, version: int) -> None:
        sums = {e.name: e.checksum for e in self.table.serving(version)}
        if len(set(sums.values())) > 1:
            raise SyncError(f"engines hold different weights at version {version}: {sums}")

    def _sync(self, engine: EngineEntry, target: Target) -> dict[str, Any] | None:
        """One engine's update; None when it failed or is already under way."""
        with self._lock:
            if engine.name in self._syncing:
                return None
            self._syncing.add(engine.name)
        try:
            body = {"version": target.version, "sources": target.sources, "link": target.link}
            result = self._post(engine, "sync", self._sync_timeout, body)
        except SyncError as error:
            log.warning("sync of %s", error)
            return None
        finally:
            with self._lock:
                self._syncing.discard(engine.name)
        if "error" in result:
            log.warning("sync of %s: %s", engine.name, result["error"])
            return None
        return result

    def _look_forever(self) -> None:
        while True:
            try:
                self._look()
            except Exception:
                log.exception("looking at the rollout pool failed")
            time.sleep(LOOK_SECONDS)

    def _look(self) -> None:
        """Ask every agent; late joiners and engines that missed a sync get the target."""
        before, target = self._synced, self._target
        found = [e for e in self._threads.map(self._ask, self._addresses()) if e]
        if self._synced != before:
            return  # a sync ended meanwhile: this view is older than what it told the table
        self.table.replace(found)
        for entry in found:
            behind = entry.state in (EngineState.STALE, EngineState.SERVING)
            if target and behind and entry.version != target.version:
                self._threads.submit(self._sync, entry, target)

    def _ask(self, address: str) -> EngineEntry | None:
        try:
            response = self._http.get(f"http://{address}:{AGENT_PORT}/v1/status")
            return self._entry(address, response.json())
        except (httpx.HTTPError, ValueError):
            return None

    def _entry(self, address: str, status: dict[str, Any]) -> EngineEntry:
        """An engine as its agent describes it; one with another job's weights is STALE to this one."""
        state, version = EngineState(status["state"]), status["weightVersion"]
        if status["writer"] != self._writer and state == EngineState.SERVING:
            state, version = EngineState.STALE, None
        return EngineEntry(
            name=status["name"],
            address=address,
            state=state,
            version=version,
            since=status["since"],
            restarts=status["restarts"],
            checksum=status["checksum"],
            reason=status["reason"],
            ranks=status["ranks"],
            bucket_bytes=status["bucketBytes"],
            instance=status["instance"],
            silent=status["silent"],
        )

    def _addresses(self) -> list[str]:
        try:
            found = socket.getaddrinfo(self._service, AGENT_PORT, socket.AF_INET, socket.SOCK_STREAM)
        except socket.gaierror:
            return []  # no pod yet
        return sorted({str(info[4][0]) for info in found})
