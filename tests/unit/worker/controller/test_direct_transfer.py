"""Coordination of direct transfers: a link for each engine, its life, and retries after failures."""

import json
from concurrent.futures import Future
from dataclasses import replace

from grpo_operator.api.weight_path import Backend
from grpo_worker.controller.weight_sync.direct_transfer import DirectTransferCoordinator
from grpo_worker.rollout.engine_pool import SyncError
from grpo_worker.weightsync.protocol.version import Version
from support.transfer_fakes import A, B, FakeEngines, FakeTrainers


def coordinator_of(trainers: FakeTrainers, engines: FakeEngines) -> DirectTransferCoordinator:
    return DirectTransferCoordinator(trainers, engines, Backend.GLOO, 0.1)


def links_of(engines: FakeEngines) -> dict[str, str]:
    """Return the newest link of each engine."""
    return {name: body["offer"]["name"] for name, route, body in engines.asked if route == "link"}


def opened(engines: FakeEngines) -> list[str]:
    return [name for name, route, _ in engines.asked if route == "link"]


def test_every_engine_has_a_link_of_its_own() -> None:
    trainers, engines = FakeTrainers(), FakeEngines(A, replace(B, hosts=2))
    delivery = coordinator_of(trainers, engines).deliver(Version(1))
    assert delivery.complete and delivery.metrics["timing_s/update_weights_pause"] == 2.0, (
        "the slowest counts"
    )
    offers = {name: body["offer"] for name, route, body in engines.asked if route == "link"}
    assert [(offers[n]["trainers"], offers[n]["ranks"], offers[n]["hosts"]) for n in "ab"] == [
        (2, 1, 1),
        (2, 2, 2),
    ]
    assert len(set(links_of(engines).values())) == 2 and len(json.dumps(offers["a"])) < 500
    taken = [body for _, route, body in engines.asked if route == "take"]
    assert [(body["link"], body["patience"]) for body in taken] == [(links_of(engines)[n], 0.1) for n in "ab"]


def test_trainers_that_cannot_plan_leave_the_version_to_be_staged() -> None:
    trainers, engines = FakeTrainers(), FakeEngines(A)
    trainers.no_plan = "trainer rank 0: w: the held parts leave a gap"
    delivery = coordinator_of(trainers, engines).deliver(Version(1))
    assert not delivery.complete and delivery.metrics["weight_sync/link_failures"] == 1.0
    assert engines.asked == [] and "start_rendezvous" not in trainers.events


def test_a_change_of_one_engine_changes_its_own_link_alone() -> None:
    trainers, engines = FakeTrainers(), FakeEngines(A)
    coordinator = coordinator_of(trainers, engines)
    for version in (1, 2):
        coordinator.deliver(Version(version))
    assert opened(engines) == ["a"]
    engines.engines = [replace(A, restarts=1)]
    coordinator.deliver(Version(3))
    assert opened(engines) == ["a", "a"] and len(trainers.closed) == 1
    engines.engines.append(B)
    coordinator.deliver(Version(4))
    engines.engines[1] = replace(B, instance="another")
    coordinator.deliver(Version(5))
    assert opened(engines) == ["a", "a", "b", "b"]
    engines.engines.pop(0)
    coordinator.deliver(Version(6))
    assert opened(engines)[4:] == [] and len(trainers.closed) == 3
    gang = coordinator.deliver(Version(7)).gang
    coordinator.after_trainers_start()
    assert coordinator.deliver(Version(8)).gang != gang
    assert opened(engines)[4:] == ["b"], "the new gang has no link"


def test_a_member_that_fails_ends_its_own_link_and_is_named() -> None:
    trainers, engines = FakeTrainers(), FakeEngines(A, B)
    coordinator = coordinator_of(trainers, engines)
    coordinator.deliver(Version(1))
    links = links_of(engines)
    engines.answers = {"b": SyncError("b: gone")}
    delivery = coordinator.deliver(Version(2))
    assert not delivery.complete and coordinator.failures == 1
    assert trainers.closed == [links["b"]] and ("give_up_transfer", links["b"]) in trainers.notified
    assert not any(link == links["a"] for _, link in trainers.notified)
    engines.answers = {}
    coordinator.deliver(Version(3))
    assert trainers.sent[-1] == [links["a"]], "b is left out once"
    assert coordinator.deliver(Version(4)).complete
    assert opened(engines) == ["a", "b", "b"]


def test_an_agent_gives_up_an_engine_that_is_silent_after_the_trainers_have_ended() -> None:
    trainers, engines = FakeTrainers(), FakeEngines(A, B)
    coordinator = coordinator_of(trainers, engines)
    coordinator.deliver(Version(1))
    engines.silent["b"] = Future()
    delivery = coordinator.deliver(Version(2))
    assert not delivery.complete and trainers.closed == [links_of(engines)["b"]]
    asked = [(name, body["link"]) for name, route, body in engines.asked if route == "give-up"]
    assert asked == [("b", links_of(engines)["b"])]
    assert engines.silent["b"].done(), "the agent is free for the staged version"


def test_after_failures_the_same_engine_is_tried_ever_more_rarely() -> None:
    trainers, engines = FakeTrainers(), FakeEngines(A)
    coordinator, tried = coordinator_of(trainers, engines), []
    engines.answers = {"a": {"error": "a: version N, transfer: peer is gone"}}
    for version in range(1, 13):
        before = len(engines.asked)
        coordinator.deliver(Version(version))
        if len(engines.asked) > before:
            tried.append(version)
    assert tried == [1, 3, 7] and coordinator.failures == 3
    assert opened(engines) == [name for name, _, _ in engines.asked], (
        "nothing is sent over a link that did not form"
    )
    engines.engines, engines.answers = [replace(A, restarts=1)], {}
    assert coordinator.deliver(Version(13)).complete, "another engine is tried at once"


def test_without_engines_nothing_is_complete() -> None:
    trainers = FakeTrainers()
    assert not coordinator_of(trainers, FakeEngines()).deliver(Version(1)).complete
    assert trainers.events == []
