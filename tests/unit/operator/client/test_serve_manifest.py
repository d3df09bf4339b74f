"""Manifest of a RolloutPool that serves an export of a job."""

from typing import Any

import pytest

from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.client.serve_manifest import served
from grpo_operator.plan.planner.pool_checks import check_pool
from support.objects import job

EXPORT = "/store/default-tiny-moe-12345678/export/checkpoint-40"


def _served(manifest: dict[str, Any], quantization: str = "none", name: str = "tiny-40") -> dict[str, Any]:
    engines = manifest["spec"]["rollout"]["template"]
    return served(manifest, engines, EXPORT, name, 2, quantization)


def _in_claim(**spec: Any) -> dict[str, Any]:
    return job(checkpoint={"store": {"pvc": "runs"}}, **spec)


def test_a_pool_serves_the_export_of_a_claim_with_engines_like_the_jobs() -> None:
    manifest = _in_claim()
    manifest["spec"]["rollout"]["template"]["engine"] |= {"tokenizer": True, "returnRoutedExperts": True}
    made = _served(manifest)
    spec = RolloutPoolSpec.model_validate(made["spec"])
    check_pool(spec)
    assert made["metadata"] == {"name": "tiny-40", "namespace": "default"}
    assert made["spec"]["model"] == {
        "path": "/models/default-tiny-moe-12345678/export/checkpoint-40",
        "volume": {"mountPath": "/models", "pvc": "runs"},
        "architecture": "tiny-moe",
    }
    assert (made["spec"]["replicas"], made["spec"]["serve"]) == (2, {})
    of_job = manifest["spec"]["rollout"]["template"]["engine"]
    assert spec.engine.context_length == of_job["contextLength"] and spec.engine.device == "cpu"
    assert "returnRoutedExperts" not in made["spec"]["engine"] and "tokenizer" not in made["spec"]["engine"]
    assert of_job["tokenizer"], "the job is not changed"


def test_a_store_on_nodes_is_mounted_by_the_folder_of_the_exports_only() -> None:
    made = _served(job(checkpoint={"store": {"path": "/var/lib/runs/"}}))
    assert made["spec"]["model"]["path"] == "/models/checkpoint-40"
    assert made["spec"]["model"]["volume"] == {
        "mountPath": "/models", "path": "/var/lib/runs/default-tiny-moe-12345678/export",
    }  # fmt: skip


def test_an_export_in_fp8_is_planned_as_such() -> None:
    assert _served(_in_claim(), "fp8-block128")["spec"]["engine"]["quantization"] == "fp8-block128"


def test_the_pool_has_the_jobs_place_and_a_certificate_of_its_own() -> None:
    tls = {"secretName": "mine", "caBundle": "x"}
    scheduling = {"priorityClassName": "high", "evictTrainers": True, "tls": tls}
    made = _served(_in_claim(scheduling=scheduling))
    assert made["spec"]["scheduling"] == {"priorityClassName": "high", "tls": {}}


def test_engines_of_colocated_jobs_leave_no_room_for_trainers() -> None:
    manifest = _in_claim(mode="colocated")
    manifest["spec"]["rollout"]["template"]["engine"]["memoryFraction"] = 0.4
    assert "memoryFraction" not in _served(manifest)["spec"]["engine"]


def test_what_cannot_be_served_is_refused_with_a_remedy() -> None:
    with pytest.raises(ValueError, match="copy the export to a PersistentVolumeClaim"):
        _served(job(checkpoint={"store": {"uri": "s3://runs/grpo"}}))
    with pytest.raises(ValueError, match="at most 40 characters: give --name"):
        _served(_in_claim(), name="x" * 41)
