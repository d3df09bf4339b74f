"""Agent: owns the weights, the version and the readiness of one engine.

A staged version passes through the agent in chunks; it remembers where the version came from, and streams it
again into an engine that restarts. If the trainers are away, or the engine received the version directly from
their ranks, it is streamed from a peer: another engine of the pool, which serves it. The controller, if it
runs, names the trainers' sidecars.
"""

import logging
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_operator.api.messages import AgentStatus
from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.weightsync.agent import engine_link, metrics
from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.agent.engine_link import JoinedLink
from grpo_worker.weightsync.agent.engine_place import EnginePlace
from grpo_worker.weightsync.agent.engine_state import EngineStateMachine
from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.gpu_lease import GpuLease
from grpo_worker.weightsync.agent.held_weights import HeldWeights, StagedSource
from grpo_worker.weightsync.agent.http_reader import FetchError
from grpo_worker.weightsync.agent.installer import Installer, UpdateError
from grpo_worker.weightsync.agent.link_calls import LinkCalls
from grpo_worker.weightsync.agent.peer_fill import PeerFill
from grpo_worker.weightsync.agent.peer_offer import PeerOffer
from grpo_worker.weightsync.agent.refills import Refills, UrgentCalls
from grpo_worker.weightsync.agent.served_weights import PeerError, ServedWeights
from grpo_worker.weightsync.agent.staged_version import StagedVersion
from grpo_worker.weightsync.agent.writer_guard import WriterGuard
from grpo_worker.weightsync.protocol.direct_load import KEPT
from grpo_worker.weightsync.protocol.link_offer import LinkOffer
from grpo_worker.weightsync.protocol.manifest import Manifest
from grpo_worker.weightsync.protocol.tiling import make_plan
from grpo_worker.weightsync.protocol.transfer_plan import make_transfer_plan

log = logging.getLogger(__name__)
# A scheduler that is unresponsive for this long, in addition to the timeout of a call, will not recover.
# SGLang's own watchdog waits as long for a batch.
UNRESPONSIVE_SECONDS = 300.0
_LOCK_SECONDS = 5.0  # that a peer waits for an engine which is being checked or updated
_REVOKED = "the trainers use the GPUs now"
_NO_ANSWER = "engine does not answer"


class Agent:
    """Agent of one engine. Thread-safe: updates run one at a time."""

    def __init__(
        self, name: str, engine: Engine, engine_ranks: int, bucket_bytes: int, timeout: float,
        writer: str | None = None, fetcher: Fetcher | None = None, lease_file: Path | None = None,
        place: EnginePlace | None = None, double_buffer: bool = False,
    ) -> None:  # fmt: skip
        """``double_buffer``: an engine that serves receives versions over its link into a second copy."""
        self._place = place or EnginePlace()
        self.name = name
        self._instance = uuid.uuid4().hex[:12]  # a restarted agent has another one, and has joined no group
        self._engine = engine
        self._ranks = engine_ranks
        self._installer = Installer(name, engine, engine_ranks, timeout, self._place.address)
        self._unresponsive_limit = UNRESPONSIVE_SECONDS + timeout
        self._bucket_bytes = bucket_bytes
        self._lock = threading.Lock()
        self._fetcher = fetcher or Fetcher(timeout)
        self._guard = WriterGuard(writer)
        self._lease = GpuLease(engine, lease_file)
        self._calls = LinkCalls(engine)
        self._link: JoinedLink | None = None
        self._double_buffer = double_buffer
        self._served = ServedWeights(engine, engine_ranks, timeout, self._place.address)
        self._urgent = UrgentCalls()
        self._peer_fill = PeerFill(self._place.peers, self._fetcher, bucket_bytes, self._urgent.any)
        self._held = HeldWeights()
        self._refills = Refills()
        self._state = EngineStateMachine()

    def bind(self, writer: str) -> None:
        """Accept weights from this job only. The weights of another job are dropped."""
        if writer == self._guard.writer:
            return
        with self._urgent.waiting(), self._lock:
            if not self._guard.bind(writer):
                return
            self._leave_link()
            self._held = self._held.lost().from_source(None)
            if self._state.state == EngineState.SERVING:
                self._state = self._state.stale(f"bound to {writer}")

    def status(self) -> dict[str, Any]:
        """Return the status for the controller, the operator and the readiness probe (AgentStatus)."""
        held, state = self._held, self._state
        restarting = state.state == EngineState.RESTARTING
        return AgentStatus(
            name=self.name,
            instance=self._instance,
            writer=self._guard.writer,
            attempt=self._guard.attempt,
            state=state.state,
            weight_version=state.version,
            since=state.since,
            restarts=state.restarts,
            reason=(restarting and self._place.problem()) or state.reason,
            silent=self._engine.unresponsive_seconds() > 0,
            history=list(state.history),
            checksum=held.checksum,
            staged_version=held.staged.version if held.staged else None,
            ranks=self._ranks,
            bucket_bytes=self._bucket_bytes,
            settled=self._lease.settled,
            waits=self._lease.waits,
            hosts=self._place.hosts_status(),
        ).wire()

    def may_start(self) -> bool:
        """Return whether the engine's container may start the server now."""
        return self._lease.may_start()

    def engine_lives(self) -> bool:
        """Return whether the server answers and its scheduler is responsive (liveness of its container).

        A server of a multi-host engine that waits for other hosts, or starts after they were lost, is alive.
        """
        if self._place.hosts is not None and self._state.state == EngineState.RESTARTING:
            return self._place.hosts.starting_for() < self._place.start_seconds
        return self._engine.alive() and self._engine.unresponsive_seconds() < self._unresponsive_limit

    def grant_gpu_memory(self, writer: str, parts: list[str], attempt: int = 0) -> dict[str, Any]:
        """Set the ``parts`` of the GPUs' memory that the engine may hold; none: the trainers use the GPUs.

        An engine that releases the memory of its weights loses them. Returns status(). Raises EngineError,
        ValueError, or WriterError like ``sync``.
        """
        with self._admitted(writer, attempt):
            self._lease.grant(parts)
            if self._state.state != EngineState.RESTARTING:
                self._apply_lease()
            return self.status()

    def join(self, writer: str, offer: LinkOffer, attempt: int = 0) -> dict[str, Any]:
        """Let the engine join a link with the trainer ranks of the job ``writer``.

        An engine that serves is paused meanwhile. It is out of service until it has received a version if its
        ranks recorded what they keep, which overwrites their weights. Returns status(). Raises EngineError,
        or WriterError like ``sync``.
        """
        with self._admitted(writer, attempt):
            self._leave_link()
            serving, kept = self._state.state == EngineState.SERVING, False
            if serving:
                self._engine.pause()
            try:
                self._link, kept = self._calls.run(offer.name, lambda: engine_link.join(self._engine, offer))
            except EngineError as error:
                kept = KEPT in str(error)
                raise
            finally:
                if serving:
                    self._after_join(offer.name, kept)
            return self.status()

    def _after_join(self, link: str, kept: bool) -> None:
        """Let an engine serve on, or take one that has lost its weights out of service."""
        if kept:
            self._engine.resume()
            return
        self._state = self._state.stale(f"joining {link}")
        self._held = self._held.from_source(None)

    def receive(
        self, writer: str, version: int, link: str, patience: float, attempt: int = 0
    ) -> dict[str, Any]:
        """Let the engine receive ``version`` over its link of that name, and commit it.

        ``patience``: seconds that a rank waits for a wave. Returns and raises like ``sync``. The version is
        not staged in host memory. With a double buffer, an engine that serves goes on until it has all bytes.
        """
        with self._admitted(writer, attempt):
            with self._updating(version, leave_link_on_error=True):
                joined = self._link
                if joined is None or joined.name != link:
                    raise EngineError(f"not in {link}, but in {joined.name if joined else 'no link'}")
                arguments = link, version, patience, self._calls
                fetched = self._double_buffer and self._state.state == EngineState.SERVING
                if fetched:
                    self._installer.fetch(*arguments)
                self._held = self._held.from_source(None)
                self._fetcher.forget()
                self._write(version, lambda: self._installer.receive(*arguments, fetched))
                self._held = self._held.from_source(joined)
            return self.status() | {"seconds": self._installer.seconds}

    def give_up(self, writer: str, link: str, attempt: int = 0) -> dict[str, Any]:
        """End the wait for an engine that does not answer a call about ``link``: its members have given up.

        Returns status(). Raises WriterError like ``sync``.
        """
        self._guard.check(writer, attempt)
        self._calls.give_up(link)
        return self.status()

    def sync(
        self, writer: str, version: int, sources: dict[int, str], gang: str | None = None, attempt: int = 0
    ) -> dict[str, Any]:
        """Fetch ``version`` from the sidecars of the job ``writer`` and commit it into the engine.

        ``sources``: trainer rank -> base URL. ``gang``: the trainer ranks that sent the version directly
        to other engines, and perhaps to this one. An engine that already serves these bytes is not touched.
        Returns status() with the seconds of each part. Raises UpdateError, after marking a touched engine
        STALE or RESTARTING, and WriterError for another job or an older attempt.
        """
        with self._admitted(writer, attempt, urgent=False):
            if self._held.came_from(gang) and self._serves(version):
                return self.status()
            installer = self._installer
            with self._updating(version):
                with installer.timed("pull"):
                    manifests = self._fetcher.manifests(sources, version)
                held, source = self._held.staged, _source(version, manifests, sources)
                if not (self._serves(version) and held is not None and held.digests == source.digests):
                    self._held = self._held.from_source(source)
                    self._load(self._stage(source, manifests))
            return self.status() | {"seconds": installer.seconds, "receivedBytes": self.received()}

    def _stage(self, source: StagedSource, manifests: list[Manifest]) -> StagedVersion:
        """Return a version whose chunks can be streamed. Raises PlanError, or FetchError."""
        plan = make_transfer_plan(make_plan(manifests), self._bucket_bytes)
        with self._installer.timed("pull"):
            blobs = self._fetcher.blobs(source.sources, manifests)
        staged = StagedVersion(source.version, plan, source.digests, blobs)
        if blobs.local:
            self._held = self._held.from_source(replace(source, copy=staged))
        return staged

    def offer(self) -> PeerOffer:
        """Return what agents of the pool's other engines can read from this engine.

        Raises PeerError if it does not serve, or cannot be read.
        """
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            raise PeerError("this engine is being updated")
        try:
            source, held = self._served.open(self._state), self._held
            assert self._state.version is not None, "checked by open"
            return PeerOffer(
                source.name, self._state.version, self._ranks, held.checksum, self._guard.writer,
                self._guard.attempt, held.origin,
            )  # fmt: skip
        finally:
            self._lock.release()

    def manifest(self, name: str, rank: int) -> Manifest:
        """Return the manifest of a rank in the reading ``name``. Raises PeerError when it has ended."""
        return self._served.manifest(self._state, name, rank)

    def read_weights(self, name: str, rank: int, first: int, end: int) -> tuple[memoryview, str]:
        """Return bytes of a rank's blob in the reading ``name``, and their digest; see ServedWeights."""
        return self._served.read(self._state, name, rank, first, end)

    def received(self) -> int:
        """Return the bytes that the last fetched version took over the network."""
        return self._fetcher.received

    def watch(self) -> None:
        """Check the engine once: detect a restart, and reload the staged version."""
        if not self._lock.acquire(blocking=False):
            return  # the running update detects a dead engine
        try:
            self._watch()
        finally:
            self._lock.release()

    def _watch(self) -> None:
        if not self._engine.alive():
            self._on_lost(self._place.problem() or _NO_ANSWER)
            return
        if self._state.state == EngineState.RESTARTING:
            self._on_up()
        self._apply_lease()
        if self._state.state == EngineState.SERVING:
            actual = self._engine.weight_version()
            if actual != str(self._state.version):  # it restarted between two checks
                self._on_lost(f"engine reports version {actual}, not {self._state.version}")
                self._on_up()
        self._engine.check_responsive()
        self._served.tidy(self._state)
        if self._state.state == EngineState.STALE and self._lease.has_weights and self._refills.due():
            self._refill()

    def _refill(self) -> None:
        """Load a version into a STALE engine, if one is known or a peer serves one. Raises UpdateError."""
        try:
            if not self._load_again() and not self._fill_from_peer():
                self._refills.found_nothing()
        except UpdateError as error:
            self._refills.failed()
            self._on_failure(error, touched=True)
            raise

    def _load_again(self) -> bool:
        """Load the staged version again, or a peer's if the trainers are away; return whether it was done."""
        source = self._held.reloadable
        if source is None:
            return False
        log.info("loading version %d again", source.version)
        try:
            with self._installer.updating(source.version):
                self._load(source.copy or self._find_again(source))
        except UpdateError:
            if not self._fill_from_peer():
                raise
        return True

    def _fill_from_peer(self) -> bool:
        """Load what a peer serves; return False if none serves. Raises UpdateError."""
        serving = None if self._held.awaits_next else self._peer_fill.find(self._guard.writer)
        if serving is None:
            return False
        log.info("loading version %d from one of %s", serving.version, ", ".join(serving.urls))
        with self._installer.updating(serving.version):
            with self._installer.timed("pull"):
                offer, staged = self._peer_fill.open(serving)
            self._load(staged)
        self._guard.adopt(offer.writer, offer.attempt)
        self._held = self._held.from_source(offer.origin)
        return True

    def _find_again(self, source: StagedSource) -> StagedVersion:
        """Return a version that was loaded before. Raises FetchError if the trainers have other bytes now."""
        with self._installer.timed("pull"):
            manifests = self._fetcher.manifests(source.sources, source.version)
        if _source(source.version, manifests, source.sources).digests != source.digests:
            raise FetchError(f"the trainers have published other bytes as version {source.version}")
        return self._stage(source, manifests)

    def _load(self, staged: StagedVersion) -> None:
        """Install a staged version, if the engine is up."""
        if self._state.state == EngineState.RESTARTING:
            if not self._engine.alive():
                return  # watch() loads it when the engine is back
            self._on_up()
        try:
            with self._installer.streaming(staged) as stream:
                self._write(staged.version, lambda: self._installer.install(staged, stream, record=True))
        finally:
            metrics.record_fetch(self.received())

    def _write(self, version: int, install: Callable[[], str]) -> None:
        """Run ``install``, which returns the checksum, and let the engine serve ``version``."""
        if not self._lease.has_weights:
            raise EngineError(_REVOKED)
        self._held = self._held.loading()
        self._state = self._state.stale(f"loading version {version}")
        self._held = self._held.loaded(install())
        self._state = self._state.committed(version)
        self._refills = Refills()
        metrics.set_version(version)

    def _serves(self, version: int) -> bool:
        return self._state.state == EngineState.SERVING and self._state.version == version

    def _apply_lease(self) -> None:
        had_weights = self._lease.has_weights
        self._lease.apply()
        if had_weights and not self._lease.has_weights:
            self._held = self._held.released()
            metrics.set_version(None)
            if self._state.state == EngineState.SERVING:
                self._state = self._state.stale(_REVOKED)

    def _leave_link(self) -> None:
        link, self._link = self._link, None
        self._held = self._held.without_link()
        if link is not None:
            engine_link.leave(self._engine, link)

    @contextmanager
    def _admitted(self, writer: str, attempt: int, urgent: bool = True) -> Iterator[None]:
        """Hold the lock for one call of the bound job. Raises WriterError before and after waiting for it.

        ``urgent``: the call does not wait until the engine has been filled from a peer.
        """
        self._guard.check(writer, attempt)
        with self._urgent.waiting() if urgent else nullcontext(), self._lock:
            self._guard.admit(writer, attempt)
            yield

    @contextmanager
    def _updating(self, version: int, leave_link_on_error: bool = False) -> Iterator[None]:
        """Run an update; if it fails, mark the engine and raise UpdateError."""
        before = self._state
        try:
            with self._installer.updating(version):
                yield
        except UpdateError as error:
            if leave_link_on_error:
                self._leave_link()
            self._on_failure(error, touched=self._state is not before)
            raise

    def _on_up(self) -> None:
        self._state = self._state.alive()
        self._lease.on_engine_up()

    def _on_failure(self, error: Exception, touched: bool) -> None:
        """Take an engine with partly written weights out of service; an untouched one goes on serving."""
        if not self._engine.alive():
            self._on_lost(f"{self._place.problem() or _NO_ANSWER}, during an update: {error}")
        elif touched:
            metrics.set_version(None)
            self._state = self._state.stale(f"update failed: {error}")

    def _on_lost(self, reason: str) -> None:
        self._installer.drop_group()
        self._engine.on_replaced()
        self._link = None
        self._held = self._held.lost()
        metrics.set_version(None)
        self._state = self._state.lost(reason)


def _source(version: int, manifests: list[Manifest], sources: Mapping[int, str]) -> StagedSource:
    return StagedSource(version, sources, [manifest.digest for manifest in manifests])
