"""Origin of an engine's weights, and the guard of who may write them."""

import pytest

from grpo_worker.weightsync.agent.engine_link import JoinedLink
from grpo_worker.weightsync.agent.held_weights import HeldWeights, StagedSource
from grpo_worker.weightsync.agent.writer_guard import WriterError, WriterGuard

STAGED = StagedSource(3, {0: "http://trainer:9000"}, ["d"])
LINK = JoinedLink("grpo-link-gang-x", "gang")


def test_a_staged_version_survives_a_lost_engine_and_is_reloaded() -> None:
    held = HeldWeights().from_source(STAGED).loading().loaded("sum").lost()
    assert held.reloadable is STAGED and held.checksum == ""


def test_a_staged_version_is_not_reloaded_after_the_engine_released_its_weights() -> None:
    held = HeldWeights().from_source(STAGED).loaded("sum").released()
    assert held.reloadable is None and held.staged is STAGED and held.checksum == ""
    assert held.loading().reloadable is STAGED, "a load ends the wait for the next version"


@pytest.mark.parametrize("change", [HeldWeights.without_link, HeldWeights.lost, HeldWeights.released])
def test_weights_from_a_link_cannot_be_reloaded_and_their_origin_is_forgotten(change: object) -> None:
    held = HeldWeights().from_source(LINK).loaded("sum")
    assert held.came_from(LINK.gang) and not held.came_from(None) and held.reloadable is None
    assert not change(held).came_from(LINK.gang)  # type: ignore[operator]


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
