"""Kubernetes objects as the operator reads them, for tests of pure functions."""

from pathlib import Path
from typing import Any

import yaml

from grpo_operator.api.messages import ControllerStatus, RestoredState
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.api.v1alpha1.status import Phase, RestartCounts
from grpo_operator.kuberay_client.models import RayClusterStatus
from grpo_operator.plan.observed import Observed

MANIFEST = Path(__file__).parents[2] / "manifests" / "tiny-moe.yaml"
NOW = "2026-01-01T00:00:00Z"


def job(**spec: Any) -> dict[str, Any]:
    """Return a GRPOJob as the API server returns it."""
    manifest = yaml.safe_load(MANIFEST.read_text())
    manifest["metadata"] |= {"namespace": "default", "uid": "12345678-aaaa", "generation": 1}
    manifest["spec"] |= spec
    return dict(manifest)


def spec_of(manifest: dict[str, Any]) -> GRPOJobSpec:
    return GRPOJobSpec.model_validate(manifest["spec"])


def pool_of(spec: GRPOJobSpec) -> RolloutTemplate:
    """Return the job's own rollout pool."""
    assert spec.rollout.template is not None
    return spec.rollout.template


def pod(pool: str, number: int = 0, ready: bool = True, deleting: bool = False) -> dict[str, Any]:
    """Return a pod of one of the job's pools."""
    status = "True" if ready else "False"
    metadata: dict[str, Any] = {
        "name": f"tiny-moe-{pool}-{number}",
        "labels": {"rl.grpo.dev/job": "tiny-moe", "rl.grpo.dev/pool": pool},
    }
    if deleting:
        metadata["deletionTimestamp"] = NOW
    conditions = [{"type": "Ready", "status": status}]
    return {"metadata": metadata, "status": {"podIP": "10.0.0.9", "conditions": conditions}}


def controller_status(phase: str, **changes: Any) -> ControllerStatus:
    """Return the status that the controller of a running job reports."""
    status = ControllerStatus(
        phase=Phase(phase),
        step=7,
        attempt=1,
        restored=RestoredState(step=0, source="initial"),
        restarts=RestartCounts(infrastructure=1),
        weight_version=7,
        reward_mean=0.25,
        tokens_per_second_per_gpu=123.4,
        last_checkpoint=5,
        checkpoint_location="/store/x/checkpoints",
    )
    return status.updated(**changes)


def running(phase: str = "Training", **values: Any) -> Observed:
    """Return a job whose pods all run."""
    pods = (
        pod("controller"),
        pod("trainer", 0),
        pod("trainer", 1),
        pod("rollout", 0),
        pod("rollout", 1),
    )
    return Observed(RayClusterStatus(), pods, controller_status(phase, **values))
