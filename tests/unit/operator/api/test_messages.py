"""Messages between the operator and the workers."""

import pytest
from pydantic import ValidationError

from grpo_operator.api.messages import AgentStatus, ControllerStatus
from grpo_operator.api.v1alpha1.status import EngineState, Phase, RestartCounts


def test_a_status_survives_the_wire() -> None:
    status = ControllerStatus(phase=Phase.TRAINING, step=3, weight_version=3, restarts=RestartCounts(job=1))
    assert ControllerStatus.model_validate(status.wire()) == status
    assert {
        "phase": "Training",
        "weightVersion": 3,
        "suspendRequested": False,
    }.items() <= status.wire().items()


def test_readers_ignore_unknown_keys_and_default_missing_ones() -> None:
    status = AgentStatus.model_validate({"name": "engine-0", "state": "STALE", "temperature": 70})
    assert (status.state, status.weight_version, status.restarts) == (EngineState.STALE, None, 0)
    with pytest.raises(ValidationError, match="state"):
        AgentStatus.model_validate({"name": "engine-0"})


def test_changes_are_validated() -> None:
    status = ControllerStatus().updated(data={"rows": 7}, restarts={"job": 2, "infrastructure": 0})
    assert status.data is not None and status.data.rows == 7 and status.restarts.job == 2
    with pytest.raises(TypeError, match="ControllerStatus has no field stage"):
        status.updated(stage=1)
    with pytest.raises(ValidationError):
        status.updated(step="many")
