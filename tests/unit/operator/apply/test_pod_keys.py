"""Secrets with keys, against a stand-in for the API server that holds Secrets only."""

import asyncio
from typing import cast

import pytest

from grpo_operator.api.keys import owner_key, secret_data, token
from grpo_operator.api.names import EPOCH_SECRET, MASTER_SECRET, ROTATE_ANNOTATION, key_secret
from grpo_operator.apply.pod_keys import PodKeys
from grpo_operator.kuberay_client.kube import Kube
from support.objects import job
from support.secrets_api import SecretsApi

OVERLAP = 300.0


class World:
    """An operator, its clock and the Secrets."""

    def __init__(self) -> None:
        self.kube, self.now = SecretsApi(), 1000.0
        self.keys = self.started()

    def started(self) -> PodKeys:
        return PodKeys(cast(Kube, self.kube), OVERLAP, lambda: self.now)

    def provide(self) -> None:
        asyncio.run(self.keys.provide(job(), "owner"))

    def token(self) -> str:
        return asyncio.run(self.keys.token(job(), "owner"))

    def ask_for_an_epoch(self) -> None:
        self.kube.secrets[EPOCH_SECRET]["metadata"]["annotations"] = {ROTATE_ANNOTATION: "x"}


@pytest.fixture
def world() -> World:
    made = World()
    made.provide()
    return made


def test_the_key_of_a_job_is_derived_again_and_never_read(world: World) -> None:
    master = world.kube.content(MASTER_SECRET)["key"]
    own = key_secret(job())
    assert world.kube.content(own) == secret_data(master, job(), None)
    assert world.kube.secrets[own]["immutable"] and world.kube.secrets[MASTER_SECRET]["immutable"]
    (reference,) = world.kube.secrets[own]["metadata"]["ownerReferences"]
    assert reference["uid"] == job()["metadata"]["uid"]
    world.keys = world.started()
    world.provide()
    assert world.token() == token(owner_key(master, job()), world.kube.epochs.newest)
    assert f"get {own}" not in world.kube.asked


def test_secrets_are_asked_for_seldom(world: World) -> None:
    before = len(world.kube.asked)
    for _ in range(100):
        world.provide()
    assert len(world.kube.asked) == before
    world.now += OVERLAP / 5 + 1
    world.provide()
    assert world.kube.asked[before:] == [f"get {MASTER_SECRET}", f"get {EPOCH_SECRET}"]


def test_an_annotation_begins_an_epoch_and_the_operator_changes_over_last(world: World) -> None:
    first, old = world.token(), world.kube.epochs
    world.ask_for_an_epoch()
    world.now += 61
    world.provide()
    new = world.kube.epochs
    assert new.previous == old.newest and new.since == world.now
    assert world.kube.secrets[EPOCH_SECRET]["metadata"]["annotations"] == {}
    assert world.token() == first, "until all pods have seen it"
    world.now += OVERLAP
    assert world.token() != first


def test_an_epoch_waits_until_the_one_before_has_ended(world: World) -> None:
    for _ in range(2):
        world.ask_for_an_epoch()
        world.now += 61
        world.provide()
    first = world.kube.epochs
    assert world.kube.secrets[EPOCH_SECRET]["metadata"]["annotations"], "the second request is still there"
    world.now += 2 * OVERLAP
    world.provide()
    assert world.kube.epochs.previous == first.newest


def test_jobs_go_on_in_the_old_epoch_when_no_other_one_can_be_written(world: World) -> None:
    first = world.token()
    world.ask_for_an_epoch()
    world.kube.refused = {"patch"}
    world.now += 61
    world.provide()
    assert world.token() == first
    world.kube.refused = set()
    world.now += 61
    world.provide()
    assert world.kube.epochs.previous is not None


def test_deleted_secrets_come_back_as_they_were(world: World) -> None:
    epochs, own = world.kube.epochs, world.kube.content(key_secret(job()))
    del world.kube.secrets[EPOCH_SECRET], world.kube.secrets[key_secret(job())]
    world.now += 601
    world.provide()
    assert world.kube.epochs == epochs and world.kube.content(key_secret(job())) == own


def test_the_secrets_of_another_replica_count(world: World) -> None:
    other = world.started()
    asyncio.run(other.provide(job(), "owner"))
    assert asyncio.run(other.token(job(), "owner")) == world.token()


def test_a_job_of_an_older_operator_is_called_with_the_master_key_and_gets_no_secret() -> None:
    world = World()
    asyncio.run(world.keys.provide(job(), "namespace"))
    assert list(world.kube.secrets) == [MASTER_SECRET]
    master = world.kube.content(MASTER_SECRET)["key"]
    assert asyncio.run(world.keys.token(job(), "namespace")) == master
