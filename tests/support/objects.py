"""Kubernetes objects as the operator sees them, for the pure tests."""

from pathlib import Path
from typing import Any

import yaml

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.kuberay_client.models import RayClusterStatus
from grpo_operator.plan.observed import Observed

MANIFEST = Path(__file__).parents[2] / "manifests" / "tiny-moe.yaml"
NOW = "2026-01-01T00:00:00Z"


def job(**spec: Any) -> dict[str, Any]:
    """A GRPOJob as the API server returns it."""
    manifest = yaml.safe_load(MANIFEST.read_text())
    manifest["metadata"] |= {"namespace": "default", "uid": "12345678-aaaa", "generation": 1}
    manifest["spec"] |= spec
    return dict(manifest)


def spec_of(manifest: dict[str, Any]) -> GRPOJobSpec:
    return GRPOJobSpec.model_validate(manifest["spec"])


def pool_of(spec: GRPOJobSpec) -> RolloutTemplate:
    """The job's own rollout pool."""
    assert spec.rollout.template is not None
    return spec.rollout.template


def pod(pool: str, number: int = 0, ready: bool = True, deleting: bool = False) -> dict[str, Any]:
    """A pod of the job's pool."""
    status = "True" if ready else "False"
    metadata: dict[str, Any] = {
        "name": f"tiny-moe-{pool}-{number}",
        "labels": {"rl.grpo.dev/job": "tiny-moe", "rl.grpo.dev/pool": pool},
    }
    if deleting:
        metadata["deletionTimestamp"] = NOW
    conditions = [{"type": "Ready", "status": status}]
    return {"metadata": metadata, "status": {"podIP": "10.0.0.9", "conditions": conditions}}


def progress(phase: str, **values: Any) -> dict[str, Any]:
    """The controller's report."""
    report: dict[str, Any] = {
        "phase": phase,
        "message": "",
        "step": 7,
        "attempt": 1,
        "restarts": {"job": 0, "infrastructure": 1},
        "weight_version": 7,
        "reward_mean": 0.25,
        "tokens_per_second_per_gpu": 123.4,
        "last_checkpoint": 5,
        "checkpoint_location": "/store/x/checkpoints",
        "suspend_requested": False,
    }
    return report | values


def running(phase: str = "Training", **values: Any) -> Observed:
    """A job whose pods all run."""
    pods = (
        pod("controller"),
        pod("trainer", 0),
        pod("trainer", 1),
        pod("rollout", 0),
        pod("rollout", 1),
    )
    return Observed(RayClusterStatus(), pods, progress(phase, **values))
