"""Admission while a reconcile that was admitted has not written its RayCluster yet."""

from typing import Any

import pytest

from grpo_operator.api.names import Owner
from grpo_operator.handlers.reconcilers.admission_round import SETTLE_SECONDS, AdmissionRound
from grpo_operator.observe.cache import Cache
from support.clocks import FakeClock
from support.objects import job

YOUNG, OLD = Owner("GRPOJob", "default", "young"), Owner("GRPOJob", "default", "old")


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def cache() -> Cache:
    """Return a cache with a node on which one tiny job has room, and the younger job."""
    cache = Cache()
    room = {"cpu": "20", "memory": "64Gi", "pods": "110"}
    node = {
        "metadata": {"name": "n", "labels": {}},
        "spec": {},
        "status": {"allocatable": room, "conditions": [{"type": "Ready", "status": "True"}]},
    }
    cache.store("nodes", {"type": "ADDED", "object": node})
    _add(cache, YOUNG, "2026-01-02T00:00:00Z")
    return cache


def _add(cache: Cache, owner: Owner, created: str, **rollout: Any) -> None:
    made = job()
    made["spec"]["trainer"]["resources"] = {"cpu": "6", "memory": "8Gi"}
    made["spec"]["rollout"] = rollout or made["spec"]["rollout"]
    own = {"name": owner.name, "uid": owner.name, "creationTimestamp": created}
    made["metadata"] = made["metadata"] | own
    cache.jobs[owner.namespace, owner.name] = made


def test_an_owner_that_is_being_started_keeps_its_place_before_an_older_one(
    cache: Cache, clock: FakeClock
) -> None:
    admissions = AdmissionRound(cache, clock.now)
    admissions.update()
    assert not admissions.wait_reason(YOUNG)
    admissions.started(YOUNG)
    _add(cache, OLD, "2026-01-01T00:00:00Z")
    clock.sleep(1000)
    admissions.update()
    assert admissions.wait_reason(OLD) and not admissions.wait_reason(YOUNG)
    admissions.ended(YOUNG)
    clock.sleep(SETTLE_SECONDS / 2)
    admissions.update()
    assert admissions.wait_reason(OLD), "the cache may not have the RayCluster yet"
    clock.sleep(SETTLE_SECONDS)
    admissions.update()
    assert admissions.wait_reason(YOUNG) and not admissions.wait_reason(OLD), (
        "nothing was written: age counts"
    )


def test_an_owner_that_waits_gains_nothing_by_being_reconciled(cache: Cache, clock: FakeClock) -> None:
    _add(cache, OLD, "2026-01-01T00:00:00Z")
    admissions = AdmissionRound(cache, clock.now)
    admissions.update()
    assert admissions.wait_reason(YOUNG)
    admissions.started(YOUNG)
    admissions.update()
    assert admissions.wait_reason(YOUNG) and not admissions.wait_reason(OLD)


def test_a_job_that_waits_for_a_pool_is_not_bound_by_being_reconciled(cache: Cache, clock: FakeClock) -> None:
    pool = Owner("RolloutPool", "default", "shared")
    for owner, created in ((YOUNG, "2026-01-02T00:00:00Z"), (OLD, "2026-01-01T00:00:00Z")):
        _add(cache, owner, created, poolRef={"name": "shared"})
    admissions = AdmissionRound(cache, clock.now)
    admissions.update()
    assert admissions.writer(pool) == OLD
    admissions.started(YOUNG)
    admissions.update()
    assert admissions.writer(pool) == OLD
    admissions.started(OLD)
    _add(cache, Owner("GRPOJob", "default", "older"), "2025-01-01T00:00:00Z", poolRef={"name": "shared"})
    admissions.update()
    assert admissions.writer(pool) == OLD, "its agents may accept this job's weights already"
