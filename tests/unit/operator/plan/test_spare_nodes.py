"""Spare training pods: their number, their GPUs, and what the status says of them."""

from typing import Any

import pytest
import yaml

from grpo_operator.api.names import TRAINER
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.status import GRPOJobStatus, LayoutStatus
from grpo_operator.cli.report import as_data, as_table
from grpo_operator.kuberay_client.models import RayClusterStatus
from grpo_operator.plan.capacity.feasibility import infeasible
from grpo_operator.plan.capacity.pod_requests import job_requests
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.planner.resolve import resolve
from grpo_operator.plan.status.grpojob import job_status
from grpo_operator.render.policies import trainer_budget
from grpo_operator.render.ray_cluster import job_cluster
from grpo_operator.settings import OperatorSettings
from support.objects import MANIFEST, NOW, controller_status, job, pod, pool_of, spec_of

LAYOUT = LayoutStatus(world=2, data=1, tensor=2, pipeline=1, context=1, expert=2, expert_tensor=1, stages=[2])


def _job(spares: int, **spec: Any) -> dict[str, Any]:
    manifest = job(**spec)
    manifest["spec"]["trainer"] |= {"spareNodes": spares}
    return manifest


def _status(spares: int, trainers: int) -> GRPOJobStatus:
    pods = [pod("controller"), pod("rollout", 0), pod("rollout", 1)]
    pods += [pod(TRAINER, number) for number in range(trainers)]
    seen = Observed(RayClusterStatus(), tuple(pods), controller_status("Training"))
    manifest = _job(spares)
    spec = spec_of(manifest)
    return job_status(manifest, spec, LAYOUT, pool_of(spec), seen, NOW)


def _degraded(status: GRPOJobStatus) -> str:
    return next(c.message for c in status.conditions if c.type == "Degraded")


def test_spares_are_pods_of_the_training_pool_which_no_drain_evicts() -> None:
    manifest = _job(2)
    spec = spec_of(manifest)
    cluster = job_cluster(manifest, spec, pool_of(spec), OperatorSettings("t:1", "r:1"), False).wire()
    (group,) = [g for g in cluster["spec"]["workerGroupSpecs"] if g["groupName"] == TRAINER]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (4, 4, 4)
    assert trainer_budget(manifest, spec)["spec"]["minAvailable"] == 4


def test_the_status_counts_spares_apart_from_ranks() -> None:
    whole = _status(spares=1, trainers=3)
    assert (whole.train_ready, whole.spares and whole.spares.ready) == ("2/2 +1", 1)
    assert whole.train is not None and whole.train.ready == 2 and not _degraded(whole)
    lost = _status(spares=1, trainers=2)
    assert lost.train_ready == "2/2 +0" and "spare training pods 0/1" in _degraded(lost)
    assert _status(spares=1, trainers=1).train_ready == "1/2 +0"
    assert _status(spares=0, trainers=2).train_ready == "2/2", "a job without spares says nothing of them"


def test_a_job_that_fits_only_without_its_spares_is_refused_with_the_remedy() -> None:
    def node(number: int) -> dict[str, Any]:
        capacity = {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"}
        meta = {"name": f"n{number}", "labels": {}}
        return {"metadata": meta, "spec": {}, "status": {"allocatable": capacity}}

    def problem(spares: int) -> str | None:
        manifest = _job(spares)
        manifest["spec"]["trainer"] |= {"device": "cuda", "gpusPerNode": 8, "parallelism": {"tensor": 8}}
        return infeasible(job_requests(spec_of(manifest), None), [node(0), node(1)])

    assert problem(0) is None
    found = problem(1) or ""
    assert "spec.trainer.nodes + spareNodes=3: only 2 of 3 trainer pods" in found
    assert "lower spec.trainer.nodes + spareNodes" in found


def test_the_gpu_hours_of_a_step_contain_spares() -> None:
    body = yaml.safe_load((MANIFEST.parent / "deepseek-v3-512xh100.yaml").read_text())["spec"]
    found = []
    for spares in (0, 2):
        body["trainer"]["spareNodes"] = spares
        spec = GRPOJobSpec.model_validate(body)
        data = as_data(spec, pool_of(spec), resolve(spec, pool_of(spec)), 1e9)
        found.append((data["step"]["gpu_hours"] / data["step"]["seconds"] * 3600, as_table(data)))
    assert [round(gpus) for gpus, _ in found] == [512, 528]
    assert "spare" not in found[0][1] and "32 nodes, 256 x h100-80gb, and 2 spare nodes" in found[1][1]


def test_colocated_jobs_have_no_spares() -> None:
    manifest = _job(1, mode="colocated")
    manifest["spec"]["rollout"]["template"] |= {"replicas": 2}
    with pytest.raises(ValueError, match=r"excludes trainer\.spareNodes"):
        spec_of(manifest)
