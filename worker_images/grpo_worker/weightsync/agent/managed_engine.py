"""Managed engine: state of one engine, its weights, its link and its GPU memory, which change together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from grpo_operator.api.names import OWN_VERSION
from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.common.log_lines import LABELS
from grpo_worker.weightsync.agent import engine_link, metrics
from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.agent.engine_link import JoinedLink
from grpo_worker.weightsync.agent.engine_place import EnginePlace
from grpo_worker.weightsync.agent.engine_state import EngineStateMachine
from grpo_worker.weightsync.agent.gpu_lease import GpuLease
from grpo_worker.weightsync.agent.held_weights import HeldWeights, Origin
from grpo_worker.weightsync.agent.installer import Installer, UpdateError
from grpo_worker.weightsync.agent.refills import Refills

_REVOKED = "the trainers use the GPUs now"
_NO_ANSWER = "engine does not answer"


class ManagedEngine:
    """One engine under its agent.

    Not thread-safe: callers hold the agent's lock. Without it they may only read ``state`` and ``held``,
    whose values are immutable, and call ``client``.

    ``client``: of the engine's server. ``installer``: runs its updates. ``lease``: of its GPUs' memory.
    ``link``: the one that it has joined. ``refills``: times of the attempts to load a version without a call.
    """

    def __init__(self, client: Engine, installer: Installer, lease: GpuLease, place: EnginePlace) -> None:
        self.client = client
        self.installer = installer
        self.lease = lease
        self._place = place
        self.state = EngineStateMachine()
        self.held = HeldWeights()
        self.link: JoinedLink | None = None
        self.refills = Refills()

    @property
    def restarting(self) -> bool:
        """True if the server is down, or has not been seen since it started."""
        return self.state.state == EngineState.RESTARTING

    @property
    def serving(self) -> bool:
        """True if the engine serves a committed version."""
        return self.state.state == EngineState.SERVING

    def serves(self, version: int) -> bool:
        """Return whether the engine serves this version."""
        return self.serving and self.state.version == version

    def check(self) -> bool:
        """Detect a restart of the server; return whether it answers.

        Raises EngineError if its scheduler is unresponsive, or does not release or allocate memory.
        """
        if not self.client.alive():
            self._on_lost(self._problem())
            return False
        if self.restarting:
            self.on_up()
        self._apply_lease()
        if self.serving:
            actual = self.client.weight_version()
            if actual != str(self.state.version):  # it restarted between two checks
                self._on_lost(f"engine reports version {actual}, not {self.state.version}")
                self.on_up()
        self.client.check_responsive()
        return True

    def grant(self, parts: list[str]) -> None:
        """Set the parts of the memory that the engine may hold, and apply this if the server is up.

        Raises EngineError, or ValueError for an unknown part.
        """
        self.lease.grant(parts)
        if not self.restarting:
            self._apply_lease()

    @contextmanager
    def updating(self, version: int, leave_link_on_error: bool = False) -> Iterator[None]:
        """Run an update; if it fails, mark the engine and raise UpdateError."""
        before = self.state
        try:
            with self.installer.updating(version):
                yield
        except UpdateError as error:
            if leave_link_on_error:
                self.leave_link()
            self.on_failure(error, touched=self.state is not before)
            raise

    def write(self, version: int, install: Callable[[], str]) -> None:
        """Run ``install``, which returns the checksum, and let the engine serve ``version``.

        Raises EngineError if the engine has no memory for weights, and what ``install`` raises.
        """
        if not self.lease.has_weights:
            raise EngineError(_REVOKED)
        self.held = self.held.loading()
        self.state = self.state.stale(f"loading version {version}")
        self.held = self.held.loaded(install())
        self.state = self.state.committed(version)
        self.refills = Refills()
        metrics.set_version(version)
        LABELS.version = version

    def set_source(self, source: Origin) -> None:
        """Set the origin of the weights that the engine holds, or loads next."""
        self.held = self.held.from_source(source)

    def leave_link(self) -> None:
        """Let the engine leave its link, if it has joined one."""
        link, self.link = self.link, None
        self.held = self.held.without_link()
        if link is not None:
            engine_link.leave(self.client, link)

    def drop_weights(self, reason: str) -> None:
        """Leave the link, and take the engine out of service: its weights are another job's."""
        self.leave_link()
        self.held = self.held.lost().from_source(None)
        if self.serving:
            self.state = self.state.stale(reason)

    def on_overwritten(self, reason: str) -> None:
        """Take an engine whose weights were overwritten out of service."""
        self.state = self.state.stale(reason)
        self.set_source(None)

    def serve_own(self) -> None:
        """Let an engine serve that has loaded the weights of its model at its start. Raises EngineError."""
        self.client.await_scheduler()
        self.state = self.state.committed(OWN_VERSION)
        metrics.set_version(OWN_VERSION)

    def on_up(self) -> None:
        """Note that a server answers; its weights are unknown."""
        self.state = self.state.alive()
        self.lease.on_engine_up()

    def on_failure(self, error: Exception, touched: bool) -> None:
        """Take an engine with partly written weights out of service; an untouched one goes on serving."""
        if not self.client.alive():
            self._on_lost(f"{self._problem()}, during an update: {error}")
        elif touched:
            metrics.set_version(None)
            self.state = self.state.stale(f"update failed: {error}")

    def _on_lost(self, reason: str) -> None:
        self.installer.drop_group()
        self.client.on_replaced()
        self.link = None
        self.held = self.held.lost()
        metrics.set_version(None)
        self.state = self.state.lost(reason)

    def _apply_lease(self) -> None:
        had_weights = self.lease.has_weights
        self.lease.apply()
        if had_weights and not self.lease.has_weights:
            self.held = self.held.released()
            metrics.set_version(None)
            if self.serving:
                self.state = self.state.stale(_REVOKED)

    def _problem(self) -> str:
        return self._place.problem() or _NO_ANSWER
