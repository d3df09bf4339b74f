"""Coordination of direct transfers: members of a transfer group, its life, and retries after failures."""

import json
from dataclasses import replace

import pytest

from grpo_operator.api.weight_path import Backend
from grpo_worker.controller.weight_sync.direct_transfer import DirectTransferCoordinator
from grpo_worker.rollout.engine_pool import SyncError
from grpo_worker.weightsync.protocol.version import Version
from grpo_worker.weightsync.transport.rendezvous import TransferError
from support.transfer_fakes import A, B, FakeEngines, FakeTrainers


def coordinator_of(trainers: FakeTrainers, engines: FakeEngines) -> DirectTransferCoordinator:
    return DirectTransferCoordinator(trainers, engines, Backend.GLOO, 1.0)


def test_engine_ranks_follow_the_trainer_ranks() -> None:
    trainers, engines = FakeTrainers(), FakeEngines(A, B)
    assert coordinator_of(trainers, engines).transfer(Version(1)) == {"pause": 2.0}, (
        "the slowest engine counts"
    )
    offers = {name: body["offer"] for name, route, body in engines.asked if route == "link"}
    assert [(offers[n]["first"], offers[n]["world"], offers[n]["port"]) for n in "ab"] == [
        (2, 5, 1234),
        (3, 5, 1234),
    ]
    assert offers["a"]["plan_id"] == "plan" and len(json.dumps(offers["a"])) < 500


def test_ranks_that_cannot_plan_leave_the_version_to_be_staged() -> None:
    trainers, engines = FakeTrainers(), FakeEngines(A)
    trainers.no_plan = "trainer rank 0: w: gap at 0"
    delivery = coordinator_of(trainers, engines).deliver(Version(1))
    assert not delivery.complete and delivery.metrics["weight_sync/link_failures"] == 1.0
    assert engines.asked == [] and "start_rendezvous" not in trainers.events


def test_a_group_stays_open_while_its_members_are_the_same() -> None:
    trainers, engines = FakeTrainers(), FakeEngines(A)
    coordinator = coordinator_of(trainers, engines)
    for version in (1, 2):
        coordinator.transfer(Version(version))
    assert trainers.events.count("open_transfer_group") == 1
    engines.engines = [replace(A, restarts=1)]
    coordinator.transfer(Version(3))
    engines.engines.append(B)
    coordinator.transfer(Version(4))
    engines.engines[1] = replace(B, instance="another")
    coordinator.transfer(Version(5))
    assert trainers.events.count("open_transfer_group") == 4
    coordinator.after_trainers_start()
    coordinator.transfer(Version(6))
    assert trainers.events.count("open_transfer_group") == 5, "the new trainers is in no link"


def test_after_failures_the_same_members_are_tried_ever_more_rarely() -> None:
    trainers, engines = FakeTrainers(), FakeEngines(A)
    coordinator = coordinator_of(trainers, engines)
    coordinator.transfer(Version(0))
    trainers.problem = "trainer rank 1: peer is gone"
    tried = []
    for version in range(1, 13):
        before = trainers.events.count("send_weights")
        with pytest.raises(TransferError):
            coordinator.transfer(Version(version))
        if trainers.events.count("send_weights") > before:
            tried.append(version)
    assert tried == [1, 3, 7] and coordinator.failures == 3
    engines.engines = [replace(A, restarts=1)]
    trainers.problem = ""
    coordinator.transfer(Version(13))
    assert trainers.events.count("send_weights") == 5, "another engine is tried at once"


def test_a_member_that_fails_ends_it_for_all_and_is_named() -> None:
    trainers, engines = FakeTrainers(), FakeEngines(A, B)
    coordinator = coordinator_of(trainers, engines)
    coordinator.transfer(Version(1))
    engines.answers = {"a": {"error": "a: version 2, prepare: no answer"}, "b": SyncError("b: gone")}
    trainers.problem = "trainer rank 1: another member gave up"
    with pytest.raises(TransferError) as failure:
        coordinator.transfer(Version(2))
    assert all(part in str(failure.value) for part in ("a: version 2, prepare", "b: gone", "trainer rank 1"))
    assert trainers.notified == [("give_up_transfer", coordinator.group)] * 2
    assert trainers.events[-1] == "close_transfer_group"


def test_missing_engines_and_different_buckets_are_reported() -> None:
    trainers = FakeTrainers()
    with pytest.raises(TransferError, match="no engine is reachable"):
        coordinator_of(trainers, FakeEngines()).transfer(Version(1))
    with pytest.raises(TransferError, match=r"different sizes: \[64, 128\] bytes"):
        coordinator_of(trainers, FakeEngines(A, replace(B, bucket_bytes=128))).transfer(Version(1))
    assert "open_transfer_group" not in trainers.events
