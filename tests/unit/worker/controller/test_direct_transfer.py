"""When a link is opened, who is in it, and what becomes of it after a failure."""

from dataclasses import replace
from typing import cast

import pytest

from grpo_worker.controller.training.gang import TrainerGang
from grpo_worker.controller.weight_sync.direct import DirectTransfer
from grpo_worker.rollout.engine_pool import RolloutPool, SyncError
from grpo_worker.weightsync.transport.rendezvous import TransferError
from support.transfer_fakes import A, B, Gang, Pool


def linked(gang: Gang, pool: Pool) -> DirectTransfer:
    return DirectTransfer(cast(TrainerGang, gang), cast(RolloutPool, pool), "gloo", 1.0)


def test_the_members_of_a_link_have_ranks_after_the_trainers() -> None:
    gang, pool = Gang(), Pool(A, B)
    assert linked(gang, pool).send(1) == {"pause": 2.0}, "the slowest engine counts"
    offers = {name: body["offer"] for name, what, body in pool.asked if what == "link"}
    assert [(offers[n]["first"], offers[n]["world"], offers[n]["port"]) for n in "ab"] == [
        (2, 5, 1234),
        (3, 5, 1234),
    ]


def test_a_link_stays_open_while_its_members_are_the_same() -> None:
    gang, pool = Gang(), Pool(A)
    link = linked(gang, pool)
    for version in (1, 2):
        link.send(version)
    assert gang.calls.count("open_link") == 1
    pool.engines = [replace(A, restarts=1)]
    link.send(3)
    pool.engines.append(B)
    link.send(4)
    pool.engines[1] = replace(B, instance="another")
    link.send(5)
    assert gang.calls.count("open_link") == 4
    link.begin_attempt()
    link.send(6)
    assert gang.calls.count("open_link") == 5, "the new gang is in no link"


def test_after_failures_the_same_members_are_tried_ever_more_seldom() -> None:
    gang, pool = Gang(), Pool(A)
    link = linked(gang, pool)
    link.send(0)
    gang.problem = "trainer rank 1: peer is gone"
    tried = []
    for version in range(1, 13):
        before = gang.calls.count("send_weights")
        with pytest.raises(TransferError):
            link.send(version)
        if gang.calls.count("send_weights") > before:
            tried.append(version)
    assert tried == [1, 3, 7] and link.failures == 3
    pool.engines = [replace(A, restarts=1)]
    gang.problem = ""
    link.send(13)
    assert gang.calls.count("send_weights") == 5, "another engine is tried at once"


def test_a_member_that_fails_ends_it_for_all_and_is_named() -> None:
    gang, pool = Gang(), Pool(A, B)
    link = linked(gang, pool)
    link.send(1)
    pool.answers = {"a": {"error": "a: version 2, prepare: no answer"}, "b": SyncError("b: gone")}
    gang.problem = "trainer rank 1: another member gave up"
    with pytest.raises(TransferError) as failure:
        link.send(2)
    assert all(part in str(failure.value) for part in ("a: version 2, prepare", "b: gone", "trainer rank 1"))
    assert gang.told == [("give_up_link", link.latest)] * 2
    assert gang.calls[-1] == "close_link"


def test_nobody_to_link_and_buckets_that_differ_are_said() -> None:
    gang = Gang()
    with pytest.raises(TransferError, match="no engine is there"):
        linked(gang, Pool()).send(1)
    with pytest.raises(TransferError, match=r"different sizes: \[64, 128\] bytes"):
        linked(gang, Pool(A, replace(B, bucket_bytes=128))).send(1)
    assert "open_link" not in gang.calls
