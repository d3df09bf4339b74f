"""Who waits for what when a version is sent: engines for their weights, nobody for the copy of late ones."""

from typing import Any, cast

import pytest

from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.controller.training.worker_group import GangError
from grpo_worker.controller.weight_sync.synchronizer import WeightSender
from grpo_worker.rollout.engine_pool import RolloutPool
from support.objects import job, spec_of
from support.transfer_fakes import A, Gang, Pool


def sender(gang: Gang, pool: Pool, **weight_sync: Any) -> WeightSender:
    spec = spec_of(job(weightSync=weight_sync))
    return WeightSender(cast(TrainerGang, gang), cast(RolloutPool, pool), spec)


def test_engines_go_on_while_the_copy_for_late_ones_is_made() -> None:
    gang, pool = Gang(), Pool(A)
    pool.serving = True
    sent = sender(gang, pool).send(7)
    assert not sent.done() and pool.target is None, "no engine is told of a copy that is not there"
    gang.let_go.set()
    found = sent.result(10)
    assert found.digests == ["digest-0", "digest-1"]
    assert pool.target and pool.target.version == 7 and pool.target.link
    assert found.metrics["weight_sync/link_failures"] == 0
    assert {"timing_s/update_weights_link", "timing_s/update_weights_publish"} <= found.metrics.keys()


@pytest.mark.parametrize("fault", ["no link", "the link fails", "too few engines"])
def test_without_enough_engines_on_a_link_everything_is_waited_for(fault: str) -> None:
    """A version that engines still serve from an attempt before does not count either."""
    gang, pool = Gang(), Pool(A)
    pool.serving = fault != "too few engines"
    gang.problem = "peer is gone" if fault == "the link fails" else ""
    gang.let_go.set()
    sent = sender(gang, pool, transport="staged" if fault == "no link" else "gloo").send(7)
    assert sent.done() and pool.target and pool.target.version == 7
    assert ("weight_sync/link_failures" in sent.result().metrics) == (fault != "no link")


def test_a_rank_that_dies_over_the_copy_is_heard_of_later() -> None:
    gang, pool = Gang(), Pool(A)
    pool.serving = gang.dies = True
    sent = sender(gang, pool).send(7)
    gang.let_go.set()
    with pytest.raises(GangError, match="a rank is gone"):
        sent.result(10)
    assert pool.target is None
