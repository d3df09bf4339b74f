"""Refiller: loads a version into a STALE engine without a call of the controller.

The version that was staged last is streamed again. If the trainers are away, or the engine received the
version directly from their ranks, it is streamed from a peer: another engine of the pool, which serves it. If
none does, the version from which the trainers would start again is streamed from the checkpoint store.
"""

import logging

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.weightsync.agent.blobs import DamageError
from grpo_worker.weightsync.agent.held_weights import StagedSource
from grpo_worker.weightsync.agent.installer import UpdateError
from grpo_worker.weightsync.agent.managed_engine import ManagedEngine
from grpo_worker.weightsync.agent.peer_fill import PeerFill
from grpo_worker.weightsync.agent.staged_loader import StagedLoader
from grpo_worker.weightsync.agent.store_fill import StoreFill
from grpo_worker.weightsync.agent.writer_guard import WriterGuard
from grpo_worker.weightsync.protocol.tiling import PlanError

log = logging.getLogger(__name__)


class Refiller:
    """Refills one engine. Callers hold the agent's lock.

    ``peer_fill``: versions of the pool's other engines. ``guard``: its job is the one whose weights a peer
    must have; while it has none, any peer will do, and the guard adopts the peer's job. ``store_fill``: the
    version in the job's checkpoint store.
    """

    def __init__(
        self, engine: ManagedEngine, loader: StagedLoader, peer_fill: PeerFill, store_fill: StoreFill,
        guard: WriterGuard,
    ) -> None:  # fmt: skip
        self._engine = engine
        self._loader = loader
        self._sources = (self._load_again, self._fill_from_peer, self._fill_from_store)
        self._peer_fill = peer_fill
        self._store_fill = store_fill
        self._guard = guard

    def due(self) -> bool:
        """Return whether the engine is STALE, has memory for weights, and the next attempt may begin."""
        engine = self._engine
        return engine.state.state == EngineState.STALE and engine.lease.has_weights and engine.refills.due()

    def refill(self) -> None:
        """Load a version into a STALE engine from the first source that has one.

        Raises the UpdateError of the last source that failed.
        """
        problem: UpdateError | None = None
        for load in self._sources:
            try:
                if load():
                    return
            except UpdateError as error:
                problem = error
        if problem is None:
            self._engine.refills.found_nothing()
            return
        self._engine.refills.failed()
        self._engine.on_failure(problem, touched=True)
        raise problem

    def _load_again(self) -> bool:
        """Load the version that the trainers staged; return False if none is known."""
        source = self._engine.held.reloadable
        if source is None:
            return False
        self._loader.load_again(source)
        return True

    def _fill_from_peer(self) -> bool:
        """Load what a peer serves; return False if none serves. Raises UpdateError."""
        engine = self._engine
        serving = None if engine.held.awaits_next else self._peer_fill.find(self._guard.writer)
        if serving is None:
            return False
        log.info("loading version %d from one of %s", serving.version, ", ".join(serving.urls))
        with engine.installer.updating(serving.version):
            with engine.installer.timed("pull"):
                offer, staged = self._peer_fill.open(serving)
            self._loader.install(staged)
        self._guard.adopt(offer.writer, offer.attempt)
        self._guard.note(offer.attempt, offer.version)
        engine.set_source(offer.origin)
        return True

    def _fill_from_store(self) -> bool:
        """Load the version of a checkpoint; return False if none is there or known to be the newest."""
        engine = self._engine
        point = None if engine.held.awaits_next else self._store_fill.find(self._guard.writer)
        if point is None or self._guard.outdated(point.attempt, point.version):
            return False
        log.info("loading version %d from %s", point.version, point.weights)
        try:
            with engine.installer.updating(point.version):
                with engine.installer.timed("pull"):
                    staged = self._store_fill.open(point)
                self._loader.install(staged)
        except UpdateError as error:
            if isinstance(error.__cause__, DamageError | PlanError):
                self._store_fill.set_aside(point)
            raise
        self._guard.note(point.attempt, point.version)
        engine.set_source(StagedSource(point.version, {}, staged.digests))
        return True
