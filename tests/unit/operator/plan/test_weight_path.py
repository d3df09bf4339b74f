"""Resolution of spec.weightSync into one path, and the settings that the devices rule out."""

import json
from typing import Any

import pytest

from grpo_operator.api.job_config import JobConfig
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec, RolloutTemplate
from grpo_operator.api.weight_path import Backend, WeightPath
from grpo_operator.cli.report import as_data, as_table
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.planner.pool_checks import check_pool
from grpo_operator.plan.planner.resolve import RefusedError, resolve
from grpo_operator.plan.status.grpojob import job_status, layout_status
from grpo_operator.plan.weight_path import job_weight_path, pool_weight_path
from grpo_operator.render.config_map import job_config_map
from support.objects import NOW, job, pool_of, running, spec_of

OFFLOAD = dict.fromkeys(("parameters", "gradients", "optimizer"), True)


def spec_on(trainer: str, engine: str, job_mode: str = "static", **weight_sync: Any) -> GRPOJobSpec:
    """Return a job of one trainer pod and one engine on these devices."""
    manifest = job(mode=job_mode, weightSync=weight_sync)
    spec = manifest["spec"]
    spec["trainer"] |= {"device": trainer, "nodes": 1, "offload": OFFLOAD if trainer == "cuda" else {}}
    spec["trainer"]["parallelism"] = {}
    spec["rollout"]["template"] |= {"replicas": 1, "minAvailable": 1}
    spec["rollout"]["template"]["engine"] |= {"device": engine, "tensorParallel": 1}
    return spec_of(manifest)


def shared_pool(**changes: Any) -> RolloutPoolSpec:
    own = pool_of(spec_of(job())).wire()
    return RolloutPoolSpec.model_validate(own | {"model": {"path": "preset:tiny-moe"}} | changes)


@pytest.mark.parametrize(
    ("devices", "mode", "weight_sync", "path", "text"),
    [
        (("cuda", "cuda"), "static", {}, {"direct": "nccl"}, "nccl, else http"),
        (("cuda", "cuda"), "static", {"transport": "nccl"}, {"direct": "nccl"}, "nccl, else http"),
        (("cpu", "cpu"), "static", {}, {"direct": "gloo"}, "gloo, else http"),
        (("cpu", "cpu"), "static", {"transport": "gloo"}, {"direct": "gloo"}, "gloo, else http"),
        (("cpu", "cpu"), "colocated", {}, {"direct": "gloo"}, "gloo, else http"),
        (("cuda", "cpu"), "static", {}, {}, "http"),
        (("cuda", "cuda"), "static", {"transport": "staged"}, {}, "http"),
        (("cuda", "cuda"), "static", {"transport": "nixl"}, {"staged": "nixl"}, "nixl"),
        (("cuda", "cuda"), "static", {"mode": "delta"}, {"delta": True}, "http (delta)"),
        (("cuda", "cuda"), "colocated", {}, {}, "http"),
        (
            ("cuda", "cuda"),
            "colocated",
            {"transport": "cuda-ipc"},
            {"direct": "cuda-ipc"},
            "cuda-ipc, else http",
        ),
    ],
)
def test_each_setting_resolves_to_one_path(
    devices: tuple[str, str], mode: str, weight_sync: dict[str, Any], path: dict[str, Any], text: str
) -> None:
    spec = spec_on(*devices, job_mode=mode, **weight_sync)
    resolved = job_weight_path(spec, pool_of(spec))
    assert resolved == WeightPath.model_validate(path) and str(resolved) == text


@pytest.mark.parametrize(
    ("transport", "devices", "message"),
    [
        (
            "gloo",
            ("cuda", "cuda"),
            r"transport=gloo: it connects cpu devices only, but trainer\.device is cuda",
        ),
        (
            "nccl",
            ("cpu", "cpu"),
            r"transport=nccl: it connects cuda devices only, but trainer\.device is cpu",
        ),
        ("nccl", ("cuda", "cpu"), r"but rollout\.template\.engine\.device is cpu: set transport to auto"),
    ],
)
def test_a_backend_that_does_not_fit_the_devices_is_refused(
    transport: str, devices: tuple[str, str], message: str
) -> None:
    spec = spec_on(*devices, transport=transport)
    with pytest.raises(RefusedError, match=message):
        resolve(spec, pool_of(spec))


def test_a_shared_pool_decides_how_staged_versions_are_read() -> None:
    spec = spec_of(job(rollout={"poolRef": {"name": "shared"}}, weightSync={"mode": "delta"}))
    assert job_weight_path(spec, shared_pool()) == WeightPath(), "its agents do not read deltas"
    assert job_weight_path(spec, shared_pool(weightSync={"mode": "delta"})).delta
    reads = job_weight_path(spec, shared_pool(weightSync={"transport": "nixl"}))
    assert reads == WeightPath(staged="nixl")
    changed = spec.model_copy(update={"weight_sync": spec_on("cuda", "cuda", transport="nccl").weight_sync})
    with pytest.raises(RefusedError, match=r"RolloutPool shared engine\.device is cpu"):
        resolve(changed, shared_pool())


def test_a_pool_without_a_job_has_staged_settings_only() -> None:
    assert pool_weight_path(shared_pool(weightSync={"transport": "nixl"})) == WeightPath(staged="nixl")
    check_pool(shared_pool())
    with pytest.raises(
        RefusedError, match="transport=cuda-ipc: it needs trainer and engines on the same GPUs"
    ):
        check_pool(shared_pool(weightSync={"transport": "cuda-ipc"}))


def test_the_path_reaches_the_report_the_status_and_the_controller() -> None:
    manifest = job(weightSync={"mode": "delta"})
    spec = spec_of(manifest)
    plan = resolve(spec, pool_of(spec))
    table = as_table(as_data(spec, pool_of(spec), plan, 1e9))
    assert "weight path     http (delta)" in table.splitlines()
    status = job_status(manifest, spec, layout_status(plan), pool_of(spec), running(), NOW)
    assert status.weight_path == "http (delta)"
    data = job_config_map(manifest, spec, "tiny-moe-rollout", pool_of(spec))["data"]["job.json"]
    config = JobConfig.model_validate(json.loads(data))
    assert config.weight_path == plan.weight_path == WeightPath(delta=True)
    assert config.spec == spec


def test_the_path_of_an_ended_job_outlives_its_shared_pool() -> None:
    manifest = job(rollout={"poolRef": {"name": "shared"}})
    spec = spec_of(manifest)
    layout = layout_status(resolve(spec, shared_pool()))
    manifest["status"] = job_status(manifest, spec, layout, shared_pool(), running("Succeeded"), NOW).wire()
    assert manifest["status"]["weightPath"] == "gloo, else http"
    later = job_status(manifest, spec, layout, RolloutTemplate(), Observed(), NOW)
    assert later.weight_path == "gloo, else http"


def test_an_accepted_job_keeps_the_backend_of_its_devices() -> None:
    """An earlier operator accepted such a job; it must not be refused while it runs."""
    spec = spec_on("cuda", "cuda", transport="gloo")
    assert job_weight_path(spec, pool_of(spec)).direct is Backend.NCCL
