"""Weights that this engine serves, for agents of other engines: opened on demand, closed when they change."""

from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.agent.engine_state import EngineStateMachine
from grpo_worker.weightsync.agent.region_source import RegionSource
from grpo_worker.weightsync.protocol.manifest import Manifest


class PeerError(RuntimeError):
    """The engine does not serve what a peer asks for; the message says why."""


class ServedWeights:
    """Opens at most one RegionSource of ``engine``, for one state of it. Thread-safe but for ``open``.

    ``timeout``: seconds in which the engine must answer; a source that is not read for as long is closed.
    """

    def __init__(self, engine: Engine, ranks: int, timeout: float, address: str) -> None:
        self._engine = engine
        self._place = ranks, timeout, address
        self._timeout = timeout
        self._opened: tuple[EngineStateMachine, RegionSource] | None = None

    def open(self, state: EngineStateMachine) -> RegionSource:
        """Return the source of an engine that is in ``state``, in which it serves. Raises PeerError."""
        self.tidy(state)
        if state.version is None:
            raise PeerError(f"this engine is {state.state}: {state.reason}")
        if self._opened is None:
            try:
                self._opened = state, RegionSource(self._engine, state.version, *self._place)
            except EngineError as error:
                raise PeerError(f"this engine's weights cannot be read: {error}") from error
        return self._opened[1]

    def tidy(self, state: EngineStateMachine) -> None:
        """Close a source that was opened in another state than ``state``, or is not read any more."""
        opened = self._opened
        if opened is not None and (opened[0] is not state or opened[1].idle_seconds() > self._timeout):
            self._opened = None
            opened[1].close()

    def manifest(self, state: EngineStateMachine, name: str, rank: int) -> Manifest:
        """Return the manifest of a rank in the source ``name``. Raises PeerError if it is closed."""
        return self._source(state, name, rank).manifests[rank]

    def read(
        self, state: EngineStateMachine, name: str, rank: int, first: int, end: int
    ) -> tuple[memoryview, str]:
        """Return bytes ``first`` to ``end`` of a rank's blob in the source ``name``, and their digest.

        Raises PeerError if the engine has another version now, and ValueError for bytes that do not exist.
        """
        source = self._source(state, name, rank)
        try:
            return source.read(rank, first, end)
        except EngineError as error:
            self._opened = None
            raise PeerError(f"this engine's weights have changed, or it has ended: {error}") from error

    def _source(self, state: EngineStateMachine, name: str, rank: int) -> RegionSource:
        opened = self._opened
        if opened is None or opened[0] is not state or opened[1].name != name:
            raise PeerError(f"reading {name} has ended: this engine's version has changed")
        if rank not in range(len(opened[1].manifests)):
            raise ValueError(f"rank must be below {len(opened[1].manifests)}, got {rank}")
        return opened[1]
