"""Prometheus metrics of jobs: what is known is exported, by the leader only."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from grpo_operator.handlers.metrics import JobCollector
from grpo_operator.observe.cache import Cache

JOB = {"namespace": "rl", "name": "a"}


def _registry(status: dict[str, Any], spec: dict[str, Any] | None = None, leads: bool = True) -> Any:
    cache = Cache()
    cache.jobs["rl", "a"] = {"spec": spec or {}, "status": status}
    cache.pools["rl", "a-rollout"] = {"status": {"engines": [{"weightVersion": 3}, {"weightVersion": 5}, {}]}}
    registry = CollectorRegistry()
    registry.register(JobCollector(cache, lambda: leads))
    return registry


def test_the_slowest_engine_determines_the_lag() -> None:
    found = _registry({"weightVersion": 5, "step": 6, "phase": "Training"})
    assert found.get_sample_value("grpo_job_weight_version_lag", JOB) == 2
    assert found.get_sample_value("grpo_job_info", JOB | {"phase": "Training"}) == 1
    assert found.get_sample_value("grpo_job_reward_mean", JOB) is None


@pytest.mark.parametrize(("checkpoint", "step"), [({"step": 20, "complete": True}, 20), (None, 0)])
def test_the_newest_checkpoint_is_exported_with_the_interval(checkpoint: Any, step: int) -> None:
    status = {"step": 27} | ({"lastCheckpoint": checkpoint} if checkpoint else {})
    found = _registry(status, {"checkpoint": {"everySteps": 10}})
    assert found.get_sample_value("grpo_job_checkpoint_step", JOB) == step
    assert found.get_sample_value("grpo_job_checkpoint_interval_steps", JOB) == 10


def test_seconds_of_gpus_are_counters_by_use_and_by_cause() -> None:
    goodput = {"gpuSeconds": {"train": 7}, "lostGpuSeconds": {"start": 3}}
    found = _registry({"goodput": goodput, "restarts": {"job": 2}})
    assert found.get_sample_value("grpo_job_gpu_seconds_total", JOB | {"use": "train"}) == 7
    assert found.get_sample_value("grpo_job_lost_gpu_seconds_total", JOB | {"cause": "start"}) == 3
    assert found.get_sample_value("grpo_job_restarts_total", JOB | {"cause": "job"}) == 2


def test_stragglers_are_one_number_however_many_ranks_a_job_has() -> None:
    slow = [{"rank": rank, "pod": "a", "ratio": "2.0", "steps": 5} for rank in range(3)]
    assert _registry({"stragglers": slow}).get_sample_value("grpo_job_stragglers", JOB) == 3
    assert _registry({}).get_sample_value("grpo_job_stragglers", JOB) == 0


def test_ready_spare_pods_are_exported_for_jobs_that_have_some() -> None:
    found = _registry({"spares": {"ready": 1, "total": 2}})
    assert found.get_sample_value("grpo_job_spare_pods", JOB) == 1
    assert _registry({}).get_sample_value("grpo_job_spare_pods", JOB) is None


def test_a_replica_that_does_not_lead_exports_no_job() -> None:
    found = _registry({"step": 1, "phase": "Training"}, {"checkpoint": {"everySteps": 10}}, leads=False)
    assert not [sample for metric in found.collect() for sample in metric.samples]
