"""Origin of an engine's weights, and the guard of who may write them."""

import pytest

from grpo_worker.weightsync.agent.held_weights import HeldWeights, StagedSource
from grpo_worker.weightsync.agent.transfer_group import JoinedGroup
from grpo_worker.weightsync.agent.writer_guard import WriterError, WriterGuard
from grpo_worker.weightsync.protocol.transfer_plan import TransferPlan

STAGED = StagedSource(3, {0: "http://trainer:9000"}, ["d"])
GROUP = JoinedGroup("grpo-link-1-x", TransferPlan("p-1", ()))


def test_a_staged_version_survives_a_lost_engine_and_is_reloaded() -> None:
    held = HeldWeights().from_source(STAGED).loading().loaded("sum").lost()
    assert held.reloadable is STAGED and held.checksum == ""


def test_a_staged_version_is_not_reloaded_after_the_engine_released_its_weights() -> None:
    held = HeldWeights().from_source(STAGED).loaded("sum").released()
    assert held.reloadable is None and held.staged is STAGED and held.checksum == ""
    assert held.loading().reloadable is STAGED, "a load ends the wait for the next version"


@pytest.mark.parametrize("change", [HeldWeights.without_group, HeldWeights.lost, HeldWeights.released])
def test_weights_from_a_group_cannot_be_reloaded_and_their_origin_is_forgotten(change: object) -> None:
    held = HeldWeights().from_source(GROUP).loaded("sum")
    assert held.came_over(GROUP.name) and not held.came_over(None) and held.reloadable is None
    assert not change(held).came_over(GROUP.name)  # type: ignore[operator]


def test_only_the_newest_attempt_of_the_bound_job_may_write() -> None:
    guard = WriterGuard()
    with pytest.raises(WriterError, match="bound to no job yet"):
        guard.check("a", 0)
    assert guard.bind("a") and not guard.bind("a")
    guard.admit("a", 2)
    with pytest.raises(WriterError, match="attempt 1 of a may not write: attempt 2 does"):
        guard.check("a", 1)
    assert guard.bind("b")
    guard.admit("b", 0)
