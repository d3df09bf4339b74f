"""Agent: owns the weights, the version and the readiness of one engine.

It admits one call of the bound job at a time, and watches the engine between the calls. A version comes in
chunks from the trainers' sidecars, which the controller names (StagedLoader), or over a link with the trainer
ranks (LinkReceiver). An engine that restarts is loaded without a call (Refiller).
"""

import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_operator.api.messages import AgentStatus
from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.common.versions import installed
from grpo_worker.weightsync.agent.engine_client import Engine
from grpo_worker.weightsync.agent.engine_place import EnginePlace
from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.gpu_lease import GpuLease
from grpo_worker.weightsync.agent.installer import Installer
from grpo_worker.weightsync.agent.link_receiver import LinkReceiver
from grpo_worker.weightsync.agent.managed_engine import ManagedEngine
from grpo_worker.weightsync.agent.peer_fill import PeerFill
from grpo_worker.weightsync.agent.peer_offer import PeerOffer
from grpo_worker.weightsync.agent.refiller import Refiller
from grpo_worker.weightsync.agent.refills import WaitingCalls
from grpo_worker.weightsync.agent.served_weights import PeerError, ServedWeights
from grpo_worker.weightsync.agent.staged_loader import StagedLoader
from grpo_worker.weightsync.agent.store_fill import StoreFill
from grpo_worker.weightsync.agent.writer_guard import WriterError, WriterGuard
from grpo_worker.weightsync.protocol.link_offer import LinkOffer
from grpo_worker.weightsync.protocol.manifest import Manifest

# A scheduler that is unresponsive for this long, in addition to the timeout of a call, will not recover.
# SGLang's own watchdog waits as long for a batch.
UNRESPONSIVE_SECONDS = 300.0
_BIND_SECONDS = 1.0  # that the operator waits for it
_LOCK_SECONDS = 5.0  # that a peer waits for an engine which is being checked or updated


class Agent:
    """Agent of one engine. Thread-safe: updates run one at a time."""

    def __init__(
        self, name: str, engine: Engine, engine_ranks: int, bucket_bytes: int, timeout: float,
        writer: str | None = None, fetcher: Fetcher | None = None, lease_file: Path | None = None,
        place: EnginePlace | None = None, double_buffer: bool = False, *, writer_file: Path | None = None,
    ) -> None:  # fmt: skip
        """``double_buffer``: an engine that serves receives versions over its link into a second copy.

        ``lease_file``, ``writer_file``: keep the lease and the writer when this process restarts.
        """
        self.name = name
        self._instance = uuid.uuid4().hex[:12]  # a restarted agent has another one, and has joined no group
        self._ranks = engine_ranks
        self._bucket_bytes = bucket_bytes
        self._unresponsive_limit = UNRESPONSIVE_SECONDS + timeout
        self._place = place or EnginePlace()
        self._lock = threading.Lock()  # held while ``_engine`` changes
        self._calls = WaitingCalls()
        self._guard = WriterGuard(writer, writer_file)
        self._fetcher = fetcher or Fetcher(timeout)
        self._lease = GpuLease(engine, lease_file)
        shares_gpus = lease_file is not None
        self._installer = Installer(name, engine, engine_ranks, timeout, self._place, shares_gpus)
        self._engine = ManagedEngine(engine, self._installer, self._lease, self._place)
        self._receiver = LinkReceiver(self._engine, self._fetcher, double_buffer)
        self._loader = StagedLoader(self._engine, self._fetcher, bucket_bytes)
        peer_fill = PeerFill(self._place.peers, self._fetcher, bucket_bytes, self._calls.urgent)
        store_fill = StoreFill(self._place.store, writer, self._fetcher, bucket_bytes, timeout, self._calls)
        self._refiller = Refiller(self._engine, self._loader, peer_fill, store_fill, self._guard)
        self._served = ServedWeights(engine, engine_ranks, timeout, self._place.address)

    def bind(self, writer: str) -> None:
        """Accept weights from this job only. The weights of another job are dropped.

        Raises WriterError if the engine is being updated for longer: the operator calls again and again, and
        calls that waited would take all threads of the server.
        """
        if writer == self._guard.writer:
            return
        if self._place.own_weights:
            raise WriterError(f"job {writer} may not write: this engine serves the weights of its own model")
        with self._calls.waiting():
            if not self._lock.acquire(timeout=_BIND_SECONDS):
                raise WriterError(f"this engine is being updated for {self._guard.writer}: try again")
            try:
                if self._guard.bind(writer):
                    self._engine.drop_weights(f"bound to {writer}")
            finally:
                self._lock.release()

    def check_writer(self, writer: str, attempt: int) -> None:
        """Raise WriterError unless this attempt of the job may use the engine."""
        self._guard.check(writer, attempt)

    def status(self) -> dict[str, Any]:
        """Return the status for the controller, the operator and the readiness probe (AgentStatus)."""
        held, state = self._engine.held, self._engine.state
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
            silent=self._engine.client.unresponsive_seconds() > 0,
            history=list(state.history),
            checksum=held.checksum,
            staged_version=held.staged.version if held.staged and held.staged.sources else None,
            ranks=self._ranks,
            bucket_bytes=self._bucket_bytes,
            settled=self._lease.settled,
            waits=self._lease.waits,
            hosts=self._place.hosts_status(),
            versions=installed().wire(),
        ).wire()

    def may_start(self) -> bool:
        """Return whether the engine's container may start the server now."""
        return self._lease.may_start()

    def engine_lives(self) -> bool:
        """Return whether the server answers and its scheduler is responsive (liveness of its container).

        A server of a multi-host engine that waits for other hosts, or starts after they were lost, is alive.
        """
        if self._place.hosts is not None and self._engine.restarting:
            return self._place.hosts.starting_for() < self._place.start_seconds
        client = self._engine.client
        return client.alive() and client.unresponsive_seconds() < self._unresponsive_limit

    def grant_gpu_memory(self, writer: str, parts: list[str], attempt: int = 0) -> dict[str, Any]:
        """Set the ``parts`` of the GPUs' memory that the engine may hold; none: the trainers use the GPUs.

        An engine that releases the memory of its weights loses them. Returns status(). Raises EngineError,
        ValueError, or WriterError like ``sync``.
        """
        with self._admitted(writer, attempt):
            self._engine.grant(parts)
            return self.status()

    def join(self, writer: str, offer: LinkOffer, attempt: int = 0) -> dict[str, Any]:
        """Let the engine join a link with the trainer ranks of the job ``writer``; see LinkReceiver.

        Returns status(). Raises EngineError, or WriterError like ``sync``.
        """
        with self._admitted(writer, attempt):
            self._receiver.join(offer)
            return self.status()

    def receive(
        self, writer: str, version: int, link: str, patience: float, attempt: int = 0
    ) -> dict[str, Any]:
        """Let the engine receive ``version`` over its link of that name, and commit it; see LinkReceiver.

        Returns status() with the seconds of each part. Raises like ``sync``.
        """
        with self._admitted(writer, attempt):
            self._guard.note(attempt, version)
            self._receiver.receive(version, link, patience)
            return self.status() | {"seconds": self._installer.seconds}

    def give_up(self, writer: str, link: str, attempt: int = 0) -> dict[str, Any]:
        """End the wait for an engine that does not answer a call about ``link``: its members have given up.

        Returns status(). Raises WriterError like ``sync``.
        """
        self._guard.check(writer, attempt)
        self._receiver.give_up(link)
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
        with self._admitted(writer, attempt, version):
            self._guard.note(attempt, version)
            if self._engine.held.came_from(gang) and self._engine.serves(version):
                return self.status()
            self._loader.load(version, sources)
            return self.status() | {"seconds": self._installer.seconds, "receivedBytes": self.received()}

    def offer(self) -> PeerOffer:
        """Return what agents of the pool's other engines can read from this engine.

        Raises PeerError if it does not serve, or cannot be read.
        """
        if not self._lock.acquire(timeout=_LOCK_SECONDS):
            raise PeerError("this engine is being updated")
        try:
            state, held = self._engine.state, self._engine.held
            source = self._served.open(state)
            assert state.version is not None, "checked by open"
            return PeerOffer(
                source.name, state.version, self._ranks, held.checksum, self._guard.writer,
                self._guard.attempt, held.origin,
            )  # fmt: skip
        finally:
            self._lock.release()

    def manifest(self, name: str, rank: int) -> Manifest:
        """Return the manifest of a rank in the reading ``name``. Raises PeerError when it has ended."""
        return self._served.manifest(self._engine.state, name, rank)

    def read_weights(self, name: str, rank: int, first: int, end: int) -> tuple[memoryview, str]:
        """Return bytes of a rank's blob in the reading ``name``, and their digest; see ServedWeights."""
        return self._served.read(self._engine.state, name, rank, first, end)

    def received(self) -> int:
        """Return the bytes that the last fetched version took over the network, to all hosts."""
        return self._fetcher.received + self._installer.received_elsewhere

    def watch(self) -> None:
        """Check the engine once: detect a restart, and reload the staged version, or let it serve its own."""
        if not self._lock.acquire(blocking=False):
            return  # the running update detects a dead engine
        try:
            if self._engine.check():
                self._served.tidy(self._engine.state)
                if self._place.own_weights:
                    if not self._engine.serving:
                        self._engine.serve_own()
                elif self._refiller.due():
                    self._refiller.refill()
        finally:
            self._lock.release()

    @contextmanager
    def _admitted(self, writer: str, attempt: int, version: int | None = None) -> Iterator[None]:
        """Hold the lock for one call of the bound job. Raises WriterError before and after waiting for it.

        ``version``: the call waits until an engine that is being filled with it, or by a peer, is filled.
        """
        self._guard.check(writer, attempt)
        with self._calls.waiting(version), self._lock:
            self._guard.admit(writer, attempt)
            yield
