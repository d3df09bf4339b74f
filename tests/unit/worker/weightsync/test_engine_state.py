"""The engine's state machine: only a commit leads from STALE to SERVING."""

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.weightsync.agent.engine_state import EngineStateMachine, TransitionError


def test_a_restarted_engine_cannot_serve_before_a_commit() -> None:
    with pytest.raises(TransitionError, match="RESTARTING -> SERVING"):
        EngineStateMachine().committed(1)
    assert EngineStateMachine().alive().committed(1).version == 1


class Life(RuleBasedStateMachine):
    """Events in any order; the version is known exactly while SERVING."""

    def __init__(self) -> None:
        super().__init__()
        self.view = EngineStateMachine()
        self.losses = 0

    @precondition(lambda self: self.view.state == EngineState.RESTARTING)
    @rule()
    def answers(self) -> None:
        self.view = self.view.alive()

    @precondition(lambda self: self.view.state == EngineState.STALE)
    @rule()
    def commits(self) -> None:
        self.view = self.view.committed(3)

    @precondition(lambda self: self.view.state != EngineState.RESTARTING)
    @rule()
    def update_begins(self) -> None:
        self.view = self.view.stale("loading")

    @rule()
    def dies(self) -> None:
        self.losses += self.view.state != EngineState.RESTARTING
        self.view = self.view.lost("gone")

    @invariant()
    def version_means_serving(self) -> None:
        assert (self.view.version is not None) == (self.view.state == EngineState.SERVING)
        assert self.view.restarts == self.losses


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=50, stateful_step_count=30)
