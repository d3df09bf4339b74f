"""Rollout-side agent: owns its engine's weights, version and readiness.

It holds the current version in host memory, so an engine that restarts is brought back to
the pool's version here, without the trainer.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from grpo_operator.api.status import EngineState
from grpo_worker.weightsync.engine import Engine, EngineError
from grpo_worker.weightsync.group import UpdateGroup
from grpo_worker.weightsync.host_copy import HostCopy, assemble
from grpo_worker.weightsync.plan import make_plan
from grpo_worker.weightsync.pull import Puller
from grpo_worker.weightsync.transaction import EngineView

log = logging.getLogger(__name__)


class WriterError(RuntimeError):
    """A job that is not bound to the pool tried to write."""


class Agent:
    """One engine's weights. Thread-safe: one update at a time."""

    def __init__(
        self, name: str, engine: Engine, engine_ranks: int, bucket_bytes: int, timeout: float,
        writer: str | None = None,
    ) -> None:  # fmt: skip
        self._name = name
        self._engine = engine
        self._engine_ranks = engine_ranks
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout
        self._lock = threading.Lock()
        self._group: UpdateGroup | None = None
        self._groups = 0
        self._copy: HostCopy | None = None
        self._spare: HostCopy | None = None  # memory of the version before
        self._puller = Puller(timeout)
        self._seconds: dict[str, float] = {}
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

        sources: trainer rank -> base URL. Returns status() and the seconds of each phase.
        An engine that serves just these bytes already is left alone. Raises what the failing
        phase raised, after marking the engine STALE or RESTARTING; WriterError for another job.
        """
        self._check_writer(writer)
        with self._lock:
            self._check_writer(writer)  # it may have changed during the wait for the lock
            self._seconds = {}
            with self._phase("pull"):
                manifests = self._puller.manifests(sources, version)
            plan, digests = make_plan(manifests), [m.digest for m in manifests]
            if not self._serves(version, digests):
                with self._phase("pull"):
                    blobs = self._puller.blobs(sources, manifests)
                with self._phase("assemble"):
                    copy = assemble(plan, digests, blobs, self._bucket_bytes, self._spare)
                self._copy, self._spare = copy, self._copy
                self._load()
        return self.status() | {"seconds": self._seconds, "planId": plan.plan_id}

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - started

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
            log.info("reloading version %d from host memory", self._copy.plan.version)
            self._load()

    def _load(self) -> None:
        """Prepare, transfer and commit the host copy; caller holds the lock."""
        assert self._copy is not None
        if self.view.state == EngineState.RESTARTING:
            if not self._engine.alive():
                return  # watch() loads the copy when the engine is back
            self.view = self.view.alive()
        try:
            self._transfer(self._copy)
        except Exception as error:
            self._abort(error)
            raise
        self.view = self.view.stale("committing").committed(self._copy.plan.version)

    def _transfer(self, copy: HostCopy) -> None:
        if self._group is None:
            with self._phase("join"):
                self._join()
        group, version = self._group, str(copy.plan.version)
        assert group is not None
        self.view = self.view.stale(f"loading version {version}")
        with self._phase("send"):
            self._engine.pause()
            self._engine.begin_update()
            send = self._send_directly if group.direct else self._send
            send(group, copy, version)
            self._engine.end_update()
        with self._phase("verify"):
            reported = self._engine.weight_version()
            if reported != version:
                raise RuntimeError(f"engine reports version {reported} after loading {version}")
            # After a direct load every rank of the engine has compared the bytes that it wrote.
            self._checksum = copy.checksum() if group.direct else self._engine.checksum()
            self._engine.resume()

    def _join(self) -> None:
        self._groups += 1
        name = f"grpo-weights-{self._groups}"
        self._group = UpdateGroup(self._engine, name, self._engine_ranks, self._timeout)

    def _send_directly(self, group: UpdateGroup, copy: HostCopy, version: str) -> None:
        """All buckets by one request; the engine writes one while the next is under way."""
        tensors = [tensor for bucket in copy.buckets for tensor in bucket.tensors]
        sender = threading.Thread(target=self._broadcast, args=(group, copy), daemon=True)
        sender.start()
        told = self._engine.receive_all(group.name, tensors, version, copy.direct_load())
        sender.join(self._timeout)
        self._seconds |= {f"engine_{name}": value for name, value in told.pop("seconds").items()}
        log.info("version %s: %s", version, told)

    def _broadcast(self, group: UpdateGroup, copy: HostCopy) -> None:
        for bucket in copy.buckets:
            group.send(bucket.flat)

    def _send(self, group: UpdateGroup, copy: HostCopy, version: str) -> None:
        for index, bucket in enumerate(copy.buckets):
            last = index == len(copy.buckets) - 1
            sender = threading.Thread(target=group.send, args=(bucket.flat,), daemon=True)
            sender.start()
            self._engine.receive(group.name, bucket.tensors, version if last else None)
            sender.join(self._timeout)

    def _abort(self, error: Exception) -> None:
        """Nothing half applied serves: out of service, and a fresh group next time."""
        log.warning("update failed: %s", error)
        group = self._group.name if self._group else None
        self._drop_group()
        if self._engine.alive():
            self.view = self.view.stale(f"update failed: {error}")
            self._tidy_engine(group)
        else:
            self._lose(f"engine died during an update: {error}")

    def _tidy_engine(self, group: str | None) -> None:
        """A session left open would refuse the next begin; a group left behind would leak."""
        calls = [self._engine.end_update]
        if group is not None:
            calls.append(lambda: self._engine.leave_group(group))
        for call in calls:
            try:
                call()
            except EngineError as error:
                log.info("nothing to tidy: %s", error)

    def _lose(self, reason: str) -> None:
        self._drop_group()
        self._checksum = ""
        self.view = self.view.lost(reason)

    def _drop_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
