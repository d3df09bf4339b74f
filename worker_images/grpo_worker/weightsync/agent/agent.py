"""Rollout-side agent: owns its engine's weights, version and readiness.

A version that came through its host memory stays there, so an engine that restarts is brought back to it
here; after one that came over a link, from the trainers' agents.
"""

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.weightsync.agent import metrics
from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.agent.engine_state import EngineStateMachine
from grpo_worker.weightsync.agent.fetcher import Fetcher
from grpo_worker.weightsync.agent.gpu_lease import GpuLease
from grpo_worker.weightsync.agent.installer import Installer, UpdateError
from grpo_worker.weightsync.agent.staged_version import StagedVersion, assemble
from grpo_worker.weightsync.agent.transfer_group import JoinedGroup, enter, leave
from grpo_worker.weightsync.protocol.group_offer import GroupOffer
from grpo_worker.weightsync.protocol.tiling import make_plan

log = logging.getLogger(__name__)
# A scheduler that has been silent for this long, beyond the deadline of a call, does not come back by itself.
# SGLang gives one that does not get on with a batch as long.
SILENCE_SECONDS = 300.0


class WriterError(RuntimeError):
    """A job that is not bound to the pool tried to write, or an attempt of it that is over."""


class Agent:
    """One engine's weights. Thread-safe: one update at a time."""

    def __init__(
        self, name: str, engine: Engine, engine_ranks: int, bucket_bytes: int, timeout: float,
        writer: str | None = None, fetcher: Fetcher | None = None, turns: Path | None = None,
    ) -> None:  # fmt: skip
        self._name = name
        self._instance = uuid.uuid4().hex[:12]  # another one after a restart, which has forgotten its link
        self._engine = engine
        self._ranks = engine_ranks
        self._installer = Installer(name, engine, engine_ranks, timeout)
        self._patience = SILENCE_SECONDS + timeout
        self._bucket_bytes = bucket_bytes
        self._lock = threading.Lock()
        self._copy: StagedVersion | None = None
        self._spare: StagedVersion | None = None  # memory of the version before
        self._puller = fetcher or Fetcher(timeout)
        self._checksum = ""
        self._writer = writer
        self._attempt = 0  # the newest of the writer that has written
        self._link: JoinedGroup | None = None
        self._linked: str | None = None  # the link by which the version that is served has come
        self._memory = GpuLease(engine, turns)
        self._expecting = False  # is a new version on its way, so that the copy of the old one is of no use?
        self.view = EngineStateMachine()

    def bind(self, writer: str) -> None:
        """Take weights from this job alone from now on; those of the one before are not its own."""
        with self._lock:
            if writer == self._writer:
                return
            self._leave()
            self._writer, self._attempt, self._copy, self._checksum = writer, 0, None, ""
            if self.view.state == EngineState.SERVING:
                self.view = self.view.stale(f"bound to {writer}")

    def status(self) -> dict[str, Any]:
        """What the controller, the operator and the readiness probe ask for."""
        copy = self._copy
        return {
            "name": self._name,
            "instance": self._instance,
            "writer": self._writer,
            "attempt": self._attempt,
            "state": self.view.state,
            "weightVersion": self.view.version,
            "since": self.view.since,
            "restarts": self.view.restarts,
            "reason": self.view.reason,
            "silent": self._engine.silence() > 0,
            "history": self.view.history,
            "checksum": self._checksum,
            "hostCopy": copy.plan.version if copy else None,
            "ranks": self._ranks,
            "bucketBytes": self._bucket_bytes,
            "settled": self._memory.settled,
            "waits": self._memory.waits,
        }

    def may_start(self) -> bool:
        """What the engine's container asks before it starts the server."""
        return self._memory.may_start()

    def turn(self, writer: str, parts: list[str], attempt: int = 0) -> dict[str, Any]:
        """From now on the engine may hold these ``parts`` of its GPUs' memory; none: the trainers have them.

        Returns status(). Raises EngineError, ValueError, or WriterError like ``sync``. An engine that gives
        its weights' memory back has lost them.
        """
        with self._written_by(writer, attempt):
            self._memory.grant(parts)
            if self.view.state != EngineState.RESTARTING:
                self._settle()
            return self.status()

    def _settle(self) -> None:
        had = self._memory.has_weights
        self._memory.settle()
        if had and not self._memory.has_weights:
            self._expecting = True
            self._linked, self._checksum = None, ""
            metrics.serves(None)
            if self.view.state == EngineState.SERVING:
                self.view = self.view.stale("the GPUs are the trainers' for now")

    def engine_lives(self) -> bool:
        """What the liveness probe of the engine's container asks: does it answer, and its scheduler too?"""
        return self._engine.alive() and self._engine.silence() < self._patience

    def join(self, writer: str, link: GroupOffer, attempt: int = 0) -> dict[str, Any]:
        """Let the engine join a link with the ranks of the job ``writer``. Returns status().

        Raises EngineError, PlanError, or WriterError for another job or an older ``attempt``; the engine's
        weights stay as they are.
        """
        with self._written_by(writer, attempt):
            self._leave()
            self._link = enter(self._engine, link, self._bucket_bytes)
            return self.status()

    def take(self, writer: str, version: int, link: str, attempt: int = 0) -> dict[str, Any]:
        """Take ``version`` over the link of that name, and commit it into the engine.

        Returns and raises like ``sync``. Afterwards the version stands in the memory of the trainers' agents
        alone.
        """
        with self._written_by(writer, attempt):
            untouched, installer = self.view, self._installer
            try:
                with installer.updating(version):
                    held = self._link
                    if held is None or held.name != link:
                        raise EngineError(f"not in {link}, but in {held.name if held else 'no link'}")
                    self._copy = self._spare = None
                    self._puller.forget()
                    self._write(version, lambda: installer.take(link, held.transfer_plan, version))
                    self._linked = link
            except UpdateError as error:
                self._leave()
                self._failed(error, touched=self.view is not untouched)
                raise
            return self.status() | {"seconds": installer.seconds, "planId": held.transfer_plan.plan_id}

    def _leave(self) -> None:
        link, self._link, self._linked = self._link, None, None
        if link is not None:
            leave(self._engine, link)

    def sync(
        self, writer: str, version: int, sources: dict[int, str], link: str | None = None, attempt: int = 0
    ) -> dict[str, Any]:
        """Fetch ``version`` from the agents of the job ``writer`` and commit it into the engine.

        sources: trainer rank -> base URL; link: the one by which the version was sent to others, and maybe
        to this engine. Returns status() and the seconds of each part.
        An engine that serves just these bytes already is left alone. Raises UpdateError, after marking
        the engine STALE or RESTARTING if it was touched; WriterError for another job or an older attempt.
        """
        with self._written_by(writer, attempt):
            if link is not None and link == self._linked and self._is_at(version):
                return self.status()
            untouched, installer = self.view, self._installer
            try:
                with installer.updating(version):
                    with installer.timed("pull"):
                        manifests = self._puller.manifests(sources, version)
                    plan, digests = make_plan(manifests), [m.digest for m in manifests]
                    if not self._serves(version, digests):
                        with installer.timed("pull"):
                            blobs = self._puller.blobs(sources, manifests)
                        with installer.timed("assemble"):
                            copy = assemble(plan, digests, blobs, self._bucket_bytes, self._spare)
                        self._copy, self._spare = copy, self._copy
                        self._load(copy)
            except UpdateError as error:
                self._failed(error, touched=self.view is not untouched)
                raise
            return self.status() | {
                "seconds": installer.seconds, "planId": plan.plan_id, "receivedBytes": self.received()
            }  # fmt: skip

    def received(self) -> int:
        """Bytes that the last version took over the network."""
        return self._puller.received

    @contextmanager
    def _written_by(self, writer: str, attempt: int) -> Iterator[None]:
        """Around one update, alone; raises WriterError before and after the wait for that."""
        self._check_writer(writer, attempt)
        with self._lock:
            self._check_writer(writer, attempt)
            self._attempt = attempt
            yield

    def _check_writer(self, writer: str, attempt: int) -> None:
        if writer != self._writer:
            bound = f"to {self._writer}" if self._writer else "to no job yet"
            raise WriterError(f"job {writer} may not write: this engine is bound {bound}")
        if attempt < self._attempt:
            raise WriterError(f"attempt {attempt} of {writer} may not write: attempt {self._attempt} does")

    def _serves(self, version: int, digests: list[str]) -> bool:
        return self._is_at(version) and self._copy is not None and self._copy.digests == digests

    def _is_at(self, version: int) -> bool:
        return self.view.state == EngineState.SERVING and self.view.version == version

    def watch(self) -> None:
        """One look at the engine: notice a restart, and bring it back to the pool's version."""
        if not self._lock.acquire(blocking=False):
            return  # an update is running; it notices a dead engine by itself
        try:
            self._watch()
        finally:
            self._lock.release()

    def _watch(self) -> None:
        if not self._engine.alive():
            self._lose("engine does not answer")
            return
        if self.view.state == EngineState.RESTARTING:
            self._up()
        self._settle()
        if self.view.state == EngineState.SERVING:
            actual = self._engine.weight_version()
            if actual != str(self.view.version):  # it died and came back between two looks
                self._lose(f"engine reports version {actual}, not {self.view.version}")
                self._up()
        self._engine.listen()
        stale = self.view.state == EngineState.STALE and self._memory.has_weights and not self._expecting
        if stale and self._copy:
            self._reload(self._copy)

    def _up(self) -> None:
        self.view = self.view.alive()
        self._memory.came_up()

    def _reload(self, copy: StagedVersion) -> None:
        log.info("reloading version %d from host memory", copy.plan.version)
        try:
            with self._installer.updating(copy.plan.version):
                self._load(copy)
        except UpdateError as error:
            self._failed(error, touched=True)
            raise

    def _load(self, copy: StagedVersion) -> None:
        """Install ``copy``, if the engine is there; caller holds the lock."""
        if self.view.state == EngineState.RESTARTING:
            if not self._engine.alive():
                return  # watch() loads the copy when the engine is back
            self._up()
        self._linked = None
        self._write(copy.plan.version, lambda: self._installer.install(copy))

    def _write(self, version: int, install: Callable[[], str]) -> None:
        if not self._memory.has_weights:
            raise EngineError("the GPUs are the trainers' for now")
        self._expecting = False
        self.view = self.view.stale(f"loading version {version}")
        self._checksum = install()
        self.view = self.view.committed(version)
        metrics.serves(version)

    def _failed(self, error: Exception, touched: bool) -> None:
        """Nothing half applied serves; an engine that was not touched goes on as before."""
        if not self._engine.alive():
            self._lose(f"engine died during an update: {error}")
        elif touched:
            metrics.serves(None)
            self.view = self.view.stale(f"update failed: {error}")

    def _lose(self, reason: str) -> None:
        self._installer.drop_group()
        self._engine.forget()
        self._link = self._linked = None
        self._checksum = ""
        metrics.serves(None)
        self.view = self.view.lost(reason)
