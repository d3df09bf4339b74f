"""Rollout-side agent: owns its engine's weights, version and readiness.

It holds the current version in host memory, so an engine that restarts is brought back to
the pool's version here, without the trainer.
"""

import logging
import threading
from typing import Any

from grpo_operator.api.status import EngineState
from grpo_worker.weightsync import journal
from grpo_worker.weightsync.engine import Engine
from grpo_worker.weightsync.engine_view import EngineView
from grpo_worker.weightsync.host_copy import HostCopy, assemble
from grpo_worker.weightsync.install import Installer, UpdateError
from grpo_worker.weightsync.plan import make_plan
from grpo_worker.weightsync.pull import Puller

log = logging.getLogger(__name__)


class WriterError(RuntimeError):
    """A job that is not bound to the pool tried to write."""


class Agent:
    """One engine's weights. Thread-safe: one update at a time."""

    def __init__(
        self, name: str, engine: Engine, engine_ranks: int, bucket_bytes: int, timeout: float,
        writer: str | None = None, deltas: bool = False,
    ) -> None:  # fmt: skip
        self._name = name
        self._engine = engine
        self._installer = Installer(name, engine, engine_ranks, timeout)
        self._bucket_bytes = bucket_bytes
        self._lock = threading.Lock()
        self._copy: HostCopy | None = None
        self._spare: HostCopy | None = None  # memory of the version before
        self._puller = Puller(timeout, deltas)
        self._checksum = ""
        self._writer = writer
        self.view = EngineView()

    def bind(self, writer: str) -> None:
        """Take weights from this job alone from now on; those of the one before are not its own."""
        with self._lock:
            if writer == self._writer:
                return
            self._writer, self._copy, self._checksum = writer, None, ""
            if self.view.state == EngineState.SERVING:
                self.view = self.view.stale(f"bound to {writer}")

    def status(self) -> dict[str, Any]:
        """What the controller, the operator and the readiness probe ask for."""
        copy = self._copy
        return {
            "name": self._name,
            "writer": self._writer,
            "state": self.view.state,
            "weightVersion": self.view.version,
            "since": self.view.since,
            "restarts": self.view.restarts,
            "reason": self.view.reason,
            "history": self.view.history,
            "checksum": self._checksum,
            "hostCopy": copy.plan.version if copy else None,
        }

    def sync(self, writer: str, version: int, sources: dict[int, str]) -> dict[str, Any]:
        """Fetch ``version`` from the agents of the job ``writer`` and commit it into the engine.

        sources: trainer rank -> base URL. Returns status() and the seconds of each part.
        An engine that serves just these bytes already is left alone. Raises UpdateError, after marking
        the engine STALE or RESTARTING if it was touched; WriterError for another job.
        """
        self._check_writer(writer)
        with self._lock:
            self._check_writer(writer)  # it may have changed during the wait for the lock
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

    def _check_writer(self, writer: str) -> None:
        if writer != self._writer:
            bound = f"to {self._writer}" if self._writer else "to no job yet"
            raise WriterError(f"job {writer} may not write: this engine is bound {bound}")

    def _serves(self, version: int, digests: list[str]) -> bool:
        serving = self.view.state == EngineState.SERVING and self.view.version == version
        return serving and self._copy is not None and self._copy.digests == digests

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
            self.view = self.view.alive()
        if self.view.state == EngineState.SERVING:
            actual = self._engine.weight_version()
            if actual != str(self.view.version):  # it died and came back between two looks
                self._lose(f"engine reports version {actual}, not {self.view.version}")
                self.view = self.view.alive()
        if self.view.state == EngineState.STALE and self._copy:
            self._reload(self._copy)

    def _reload(self, copy: HostCopy) -> None:
        log.info("reloading version %d from host memory", copy.plan.version)
        try:
            with self._installer.updating(copy.plan.version):
                self._load(copy)
        except UpdateError as error:
            self._failed(error, touched=True)
            raise

    def _load(self, copy: HostCopy) -> None:
        """Install ``copy``, if the engine is there; caller holds the lock."""
        if self.view.state == EngineState.RESTARTING:
            if not self._engine.alive():
                return  # watch() loads the copy when the engine is back
            self.view = self.view.alive()
        self.view = self.view.stale(f"loading version {copy.plan.version}")
        self._checksum = self._installer.install(copy)
        self.view = self.view.committed(copy.plan.version)
        journal.serves(copy.plan.version)

    def _failed(self, error: Exception, touched: bool) -> None:
        """Nothing half applied serves; an engine that was not touched goes on as before."""
        if not self._engine.alive():
            self._lose(f"engine died during an update: {error}")
        elif touched:
            journal.serves(None)
            self.view = self.view.stale(f"update failed: {error}")

    def _lose(self, reason: str) -> None:
        self._installer.drop_group()
        self._checksum = ""
        journal.serves(None)
        self.view = self.view.lost(reason)
