"""State machine of one engine under weight updates. Pure.

RESTARTING -> STALE -> SERVING -> STALE ...; DEAD when the engine is given up. Only a committed version leads
to SERVING.
"""

from dataclasses import dataclass, replace
from datetime import UTC, datetime

from grpo_operator.api.v1alpha1.status import EngineState

_EDGES: dict[EngineState, set[EngineState]] = {
    EngineState.RESTARTING: {EngineState.STALE, EngineState.DEAD},
    EngineState.STALE: {EngineState.SERVING, EngineState.RESTARTING, EngineState.DEAD},
    EngineState.SERVING: {EngineState.STALE, EngineState.RESTARTING, EngineState.DEAD},
    EngineState.DEAD: {EngineState.RESTARTING},
}

_HISTORY = 16


class TransitionError(RuntimeError):
    """The state machine has no such transition."""


@dataclass(frozen=True, slots=True)
class EngineStateMachine:
    """Current state of an engine.

    ``version``: set only while SERVING. ``since``: time of the last transition (RFC 3339, UTC).
    ``restarts``: times that the server was lost. ``history``: last states, oldest first.
    """

    state: EngineState = EngineState.RESTARTING
    version: int | None = None
    since: str = ""
    restarts: int = 0
    reason: str = ""
    history: tuple[EngineState, ...] = (EngineState.RESTARTING,)

    def alive(self) -> "EngineStateMachine":
        """Return the state after the server has (re)started; its weights are unknown."""
        return self._to(EngineState.STALE, "engine answers; weights not loaded yet")

    def lost(self, reason: str) -> "EngineStateMachine":
        """Return the state after the server was lost or replaced."""
        if self.state == EngineState.RESTARTING:
            return self
        counted = replace(self, restarts=self.restarts + 1)
        return counted._to(EngineState.RESTARTING, reason)

    def stale(self, reason: str) -> "EngineStateMachine":
        """Return the state of an engine whose weights must be loaded again."""
        if self.state == EngineState.STALE:
            return replace(self, reason=reason)
        return self._to(EngineState.STALE, reason)

    def committed(self, version: int) -> "EngineStateMachine":
        """Return the state after ``version`` was completely loaded and verified."""
        moved = self._to(EngineState.SERVING, "")
        return replace(moved, version=version)

    def _to(self, state: EngineState, reason: str) -> "EngineStateMachine":
        if state not in _EDGES[self.state]:
            raise TransitionError(f"{self.state} -> {state} ({reason})")
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        history = (*self.history, state)[-_HISTORY:]
        return replace(self, state=state, version=None, since=now, reason=reason, history=history)
