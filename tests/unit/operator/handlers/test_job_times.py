"""Metrics of what alerts compare, at a time of the tests: one number for a job, however large it is."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from grpo_operator.handlers.job_times import JobTimesCollector
from grpo_operator.observe.cache import Cache
from grpo_operator.settings import PHASE_SECONDS
from support.objects import NOW

JOB = {"namespace": "rl", "name": "a"}
EARLIER = "2025-12-31T23:00:00Z"


class _Job:
    """A job in the cache of an operator, which is asked ``seconds`` after NOW."""

    def __init__(
        self, status: dict[str, Any], spec: dict[str, Any] | None = None, leads: bool = True
    ) -> None:
        self.cache = Cache()
        self.cache.jobs["rl", "a"] = {"spec": spec or {}, "status": status}
        self._leads = leads

    def metric(
        self, name: str, seconds: float = 60.0, least: Mapping[str, float] = PHASE_SECONDS, **labels: str
    ) -> float | None:
        registry = CollectorRegistry()
        now = datetime.fromisoformat(NOW).astimezone(UTC).timestamp() + seconds
        registry.register(JobTimesCollector(self.cache, lambda: self._leads, least, lambda: now))
        return registry.get_sample_value(f"grpo_job_{name}", JOB | labels)


def test_a_phase_lasts_since_the_job_entered_it_or_finished_a_step() -> None:
    job = _Job({"phase": "Recovering", "progressedAt": NOW})
    assert job.metric("phase_seconds", 90.0, phase="Recovering") == 90
    assert job.metric("phase_seconds", -5.0, phase="Recovering") == 0, "another clock is ahead"
    assert job.metric("phase_limit_seconds", phase="Recovering") == 1800


def test_parked_trainers_have_a_phase_and_a_limit_of_their_own() -> None:
    job = _Job({"phase": "Recovering", "progressedAt": EARLIER, "parkedSince": NOW})
    assert job.metric("phase_seconds", 90.0, phase="Parked") == 90
    assert job.metric("phase_limit_seconds", least={**PHASE_SECONDS, "Parked": 60}, phase="Parked") == 480
    assert job.metric("phase_seconds", phase="Recovering") is None


@pytest.mark.parametrize("phase", ["Suspended", "Succeeded", "Failed", "Invalid"])
def test_phases_that_end_only_when_somebody_acts_have_no_times(phase: str) -> None:
    checkpoint = {"step": 5, "completedAt": NOW}
    job = _Job({"phase": phase, "progressedAt": NOW, "lastCheckpoint": checkpoint, "stepSeconds": "2.5"})
    for name in ("phase_seconds", "phase_limit_seconds"):
        assert job.metric(name, phase=phase) is None
    assert job.metric("checkpoint_age_seconds") is None and job.metric("step_seconds") is None


def test_no_alert_is_raised_for_a_phase_whose_limit_is_zero() -> None:
    job = _Job({"phase": "Waiting", "progressedAt": NOW})
    assert job.metric("phase_limit_seconds", phase="Waiting") == 86400
    least = {**PHASE_SECONDS, "Waiting": 0}
    assert job.metric("phase_limit_seconds", least=least, phase="Waiting") is None
    assert job.metric("phase_seconds", least=least, phase="Waiting") == 60


@pytest.mark.parametrize(("reference", "limit"), [(None, 1800), ("shared", 7200)])
def test_engines_of_a_shared_pool_may_start_for_as_long_as_their_pool_says(
    reference: str | None, limit: float
) -> None:
    job = _Job(
        {"phase": "Starting", "progressedAt": NOW},
        {"rollout": {"poolRef": {"name": reference}} if reference else {}},
    )
    job.cache.pools["rl", "shared"] = {"spec": {"engine": {"startSeconds": 7200}}}
    job.cache.pools["rl", "a-rollout"] = {"spec": {"engine": {"startSeconds": 600}}}
    assert job.metric("phase_limit_seconds", phase="Starting") == limit


def _training(completed: str | None, running_since: str) -> _Job:
    conditions = [{"type": "Progressing", "status": "True", "lastTransitionTime": running_since}]
    saved = {"lastCheckpoint": {"step": 5} | ({"completedAt": completed} if completed else {})}
    return _Job({"phase": "Training", "conditions": conditions, "stepSeconds": "2.5"} | saved)


def test_a_checkpoint_grows_old_while_the_job_has_pods() -> None:
    assert _training(NOW, EARLIER).metric("checkpoint_age_seconds", 120.0) == 120
    assert _training(NOW, EARLIER).metric("step_seconds") == 2.5
    suspended_until_now = _training(EARLIER, NOW)
    assert suspended_until_now.metric("checkpoint_age_seconds", 120.0) == 120
    assert _training(None, EARLIER).metric("checkpoint_age_seconds") is None, "of an older operator"
    assert _Job({"phase": "Training"}).metric("checkpoint_age_seconds") is None


def test_copies_in_memory_are_two_numbers_of_a_job() -> None:
    job = _Job({"phase": "Training", "memoryCopies": {"step": 7, "failures": 2, "message": "no memory"}})
    assert (job.metric("memory_copy_step"), job.metric("memory_copy_failures")) == (7, 2)
    none_yet = _Job({"phase": "Training", "memoryCopies": {"failures": 0}})
    assert (none_yet.metric("memory_copy_step"), none_yet.metric("memory_copy_failures")) == (None, 0)
    without = _Job({"phase": "Training"})
    assert (without.metric("memory_copy_step"), without.metric("memory_copy_failures")) == (None, None)


def test_a_replica_that_does_not_lead_exports_no_times() -> None:
    status = {"phase": "Training", "progressedAt": NOW, "stepSeconds": "2.5"}
    assert _Job(status).metric("step_seconds") == 2.5
    standby = _Job(status, leads=False)
    assert standby.metric("step_seconds") is None
    assert standby.metric("phase_seconds", phase="Training") is None
