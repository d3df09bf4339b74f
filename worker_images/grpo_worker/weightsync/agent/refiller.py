"""Refiller: loads a version into a STALE engine without a call of the controller.

The version that was staged last is streamed again. If the trainers are away, or the engine received the
version directly from their ranks, it is streamed from a peer: another engine of the pool, which serves it.
"""

import logging

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.weightsync.agent.installer import UpdateError
from grpo_worker.weightsync.agent.managed_engine import ManagedEngine
from grpo_worker.weightsync.agent.peer_fill import PeerFill
from grpo_worker.weightsync.agent.staged_loader import StagedLoader
from grpo_worker.weightsync.agent.writer_guard import WriterGuard

log = logging.getLogger(__name__)


class Refiller:
    """Refills one engine. Callers hold the agent's lock.

    ``peer_fill``: versions of the pool's other engines. ``guard``: its job is the one whose weights a peer
    must have; while it has none, any peer will do, and the guard adopts the peer's job.
    """

    def __init__(
        self, engine: ManagedEngine, loader: StagedLoader, peer_fill: PeerFill, guard: WriterGuard
    ) -> None:
        self._engine = engine
        self._loader = loader
        self._peer_fill = peer_fill
        self._guard = guard

    def due(self) -> bool:
        """Return whether the engine is STALE, has memory for weights, and the next attempt may begin."""
        engine = self._engine
        return engine.state.state == EngineState.STALE and engine.lease.has_weights and engine.refills.due()

    def refill(self) -> None:
        """Load a version into a STALE engine, if one is known or a peer serves one. Raises UpdateError."""
        try:
            if not self._load_again() and not self._fill_from_peer():
                self._engine.refills.found_nothing()
        except UpdateError as error:
            self._engine.refills.failed()
            self._engine.on_failure(error, touched=True)
            raise

    def _load_again(self) -> bool:
        """Load the staged version again, or a peer's if the trainers are away; return whether it was done."""
        source = self._engine.held.reloadable
        if source is None:
            return False
        try:
            self._loader.load_again(source)
        except UpdateError:
            if not self._fill_from_peer():
                raise
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
        engine.set_source(offer.origin)
        return True
