"""Every manifest is planned: GPUs and nodes have room, engines can be built, and the step is estimated."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.paths import REPO
from grpo_operator.api.catalog.gpus import GpuType
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.cli.manifest import Manifest
from grpo_operator.cli.plan import main
from grpo_operator.plan.capacity.feasibility import infeasible
from grpo_operator.plan.capacity.pod_requests import job_requests
from grpo_operator.plan.planner.resolve import resolve
from grpo_operator.plan.planner.resources import completed_job, completed_template

FILES = sorted((REPO / "manifests").glob("*.yaml"))
WITH_GPUS = [
    file for file in [*FILES, *sorted((REPO / "manifests" / "gpu").glob("*.yaml"))] if file.stem != "tiny-moe"
]
NODE_GPUS, NODE_MEMORY = 8, "2T"
# Cores of NVIDIA's DGX with eight of these GPUs, without their second threads.
NODE_CORES = {GpuType.A100: 128, GpuType.H100: 112, GpuType.H200: 112, GpuType.B200: 112}
LARGE = [file for file in FILES if "gpu" not in file.stem and file.stem != "tiny-moe"]


def _plan(file: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main([str(file), "--json"]) == 0, capsys.readouterr().out
    (plan,) = json.loads(capsys.readouterr().out)
    return dict(plan)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_manifest_is_planned_without_a_cluster(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = _plan(file, capsys)
    assert plan["stages"], "the model is not known"
    if file.stem == "tiny-moe":
        return
    assert max(stage["total"] for stage in plan["stages"]) <= plan["usable_per_gpu"]
    assert plan["engine"]["kv_tokens"] > 0 and 0 < plan["step"]["seconds"] < 3600


@pytest.mark.parametrize("file", WITH_GPUS, ids=lambda file: file.stem)
def test_the_pods_of_a_node_fit_into_its_memory_and_cores(file: Path) -> None:
    manifest = Manifest.read(file)
    ((_, body),) = manifest.jobs
    spec = GRPOJobSpec.model_validate(body)
    pool = manifest.pool_of(spec)
    plan = resolve(spec, pool)
    assert plan.host is not None and min(plan.host.trainer, plan.host.engine, plan.host.controller) > 0
    assert spec.trainer.gpu_type == pool.engine.gpu_type
    requests = job_requests(completed_job(spec, plan.resources), completed_template(pool, plan.resources))
    gpus = sum(request.count * request.gpus for request in requests)
    nodes = [_node(number, spec.trainer.gpu_type) for number in range(math.ceil(gpus / NODE_GPUS))]
    assert nodes and infeasible(requests, nodes) is None


def _node(number: int, gpu_type: GpuType) -> dict[str, Any]:
    room = {"cpu": str(NODE_CORES[gpu_type]), "memory": NODE_MEMORY, "nvidia.com/gpu": str(NODE_GPUS)}
    return {"metadata": {"name": f"node-{number}"}, "spec": {}, "status": {"allocatable": room}}


@pytest.mark.parametrize("file", LARGE, ids=lambda file: file.stem)
def test_a_manifest_is_named_for_its_gpus(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = _plan(file, capsys)
    pools, shared = plan["pools"], plan["mode"] == "colocated"
    count = pools["trainer"]["gpus"] + (0 if shared else pools["rollout"]["gpus"])
    assert file.stem.endswith(f"-{count}x{GpuType(pools['trainer']['gpu_type']).value.split('-')[0]}")


def test_deepseek_v3_cannot_be_trained_on_128_h100s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = yaml.safe_load((REPO / "manifests" / "deepseek-v3-128xh200.yaml").read_text())
    trainer = body["spec"]["trainer"]
    trainer |= {"nodes": 16, "gpuType": "h100-80gb", "parallelism": {"auto": True}}
    trainer["offload"] = dict.fromkeys(("parameters", "gradients", "optimizer"), True)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(body))
    assert main([str(tmp_path / "job.yaml")]) == 1
    assert "no layout of 128 GPUs fits" in capsys.readouterr().out
