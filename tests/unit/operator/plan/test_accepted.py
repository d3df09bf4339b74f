"""What jobs and pools keep from their acceptance when another operator takes over."""

from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from grpo_operator.api.names import Owner
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec, RolloutPoolStatus
from grpo_operator.api.v1alpha1.status import GRPOJobStatus, LayoutStatus, SettledImages
from grpo_operator.plan.accepted import is_accepted, settled_images, spec_of
from grpo_operator.plan.planner.resolve import resolve
from grpo_operator.plan.planner.settled import with_layout, with_resources
from grpo_operator.plan.status.grpojob import job_status, layout_status, refused_status, settled_layout
from grpo_operator.plan.status.rolloutpool import pool_status, refused_pool, settled_pool_images
from grpo_operator.render.ray_cluster import job_cluster, pool_cluster
from grpo_operator.settings import OperatorSettings
from support.objects import NOW, job, pool_of, running
from support.objects import spec_of as strict_spec
from support.releases import ADDED, of_today, of_tomorrow

A, B = OperatorSettings("t:a", "r:a"), OperatorSettings("t:b", "r:b")


def _layout(spec: GRPOJobSpec, images: SettledImages | None = A.images) -> LayoutStatus:
    return layout_status(resolve(spec, pool_of(spec))).model_copy(update={"images": images})


def _accepted(**spec: Any) -> dict[str, Any]:
    """Return a running job that an operator with the settings A has accepted."""
    manifest = job(**spec)
    parsed = strict_spec(manifest)
    status = job_status(manifest, parsed, _layout(parsed), pool_of(parsed), running(), NOW)
    return manifest | {"status": status.wire()}


def _images(cluster: dict[str, Any]) -> set[str]:
    spec = cluster["spec"]
    templates = [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    pods = [[*template["containers"], *template.get("initContainers", [])] for template in templates]
    return {container["image"] for pod in pods for container in pod}


def _rendered(manifest: dict[str, Any], settings: OperatorSettings) -> dict[str, Any]:
    """Return the RayCluster as an operator with ``settings`` makes it of an accepted job."""
    spec, layout = spec_of(GRPOJobSpec, manifest, True, {}), settled_layout(manifest)
    assert layout is not None
    images = settled_images(layout.images, None, settings.images)
    pool = with_resources(pool_of(spec), layout)
    return job_cluster(manifest, with_layout(spec, layout), pool, settings.with_images(images), False).wire()


def test_an_accepted_job_keeps_its_images() -> None:
    manifest = _accepted()
    images = {"trainer": "t:a", "rollout": "r:a", "keyScope": "owner"}
    assert manifest["status"]["layout"]["images"] == images
    assert _images(_rendered(manifest, A)) == {"t:a", "r:a"}
    assert _rendered(manifest, B) == _rendered(manifest, A)


def test_images_of_the_spec_win_and_their_removal_leads_back() -> None:
    manifest = _accepted()
    manifest["spec"]["image"] = "t:own"
    manifest["spec"]["rollout"]["template"]["image"] = "r:own"
    assert _images(_rendered(manifest, B)) == {"t:own", "r:own"}
    del manifest["spec"]["image"], manifest["spec"]["rollout"]["template"]["image"]
    assert _images(_rendered(manifest, B)) == {"t:a", "r:a"}


def test_a_job_of_an_operator_that_kept_no_images_has_those_of_its_ray_cluster() -> None:
    manifest = _accepted()
    live = _rendered(manifest, A)
    assert settled_images(None, live, B.images) == A.images
    assert settled_images(None, None, B.images) == B.images, "a job that has no RayCluster is new"


def test_a_ray_cluster_without_engines_tells_the_trainers_image_only() -> None:
    manifest = _accepted()
    spec = strict_spec(manifest)
    live = job_cluster(manifest, spec, None, A, False).wire()
    assert settled_images(None, live, B.images) == SettledImages(
        trainer="t:a", rollout="r:b", key_scope="owner"
    )


def _pool() -> dict[str, Any]:
    spec = {"model": {"path": "preset:tiny-moe"}, "engine": {"device": "cpu", "dtype": "float32"}}
    metadata = {"name": "shared", "namespace": "default", "uid": "1234", "generation": 1}
    return {"apiVersion": "rl.grpo.dev/v1alpha1", "kind": "RolloutPool", "metadata": metadata, "spec": spec}


def _pool_status(pool: dict[str, Any], spec: RolloutPoolSpec) -> dict[str, Any]:
    owner = Owner("RolloutPool", "default", "shared")
    return pool_status(pool, spec, owner, running(), None, NOW, images=A.images).wire()


def test_a_pool_keeps_its_images_also_while_it_is_refused() -> None:
    pool = _pool()
    spec = RolloutPoolSpec.model_validate(pool["spec"])
    pool["status"] = _pool_status(pool, spec)
    pool["status"] = refused_pool(pool, "KubeRayTooOld", "install it", NOW, waits=True).wire()
    images = settled_images(settled_pool_images(pool), None, B.images)
    assert _images(pool_cluster(pool, spec, B.with_images(images)).wire()) == {"t:a", "r:a"}


def test_a_status_of_a_newer_operator_is_read_and_written_back_whole() -> None:
    manifest = _accepted()
    today = manifest["status"]
    manifest["status"] = of_tomorrow(today)
    status = GRPOJobStatus.of_any_release(manifest["status"])
    assert status.wire() == manifest["status"], "the newer operator finds what it has written"
    layout = settled_layout(manifest)
    assert layout is not None and layout.layout() == _layout(strict_spec(manifest)).layout()
    spec = spec_of(GRPOJobSpec, manifest, True, {})
    written = job_status(manifest, spec, layout, pool_of(spec), running(step=8), NOW).wire()
    assert written[ADDED] == written["layout"][ADDED] == written["layout"]["images"][ADDED] == "new"
    assert of_today(written) == today | {"step": 8, "progress": written["progress"]}
    refused = refused_status(manifest, "WaitingForPool", "wait", NOW, waits=True).wire()
    assert refused["layout"][ADDED] == refused[ADDED] == "new"


def test_a_pools_status_of_a_newer_operator_is_read_and_written_back() -> None:
    pool = _pool()
    spec = RolloutPoolSpec.model_validate(pool["spec"])
    today = _pool_status(pool, spec)
    pool["status"] = of_tomorrow(today)
    assert RolloutPoolStatus.of_any_release(pool["status"]).wire() == pool["status"]
    written = _pool_status(pool, spec)
    assert written[ADDED] == "new" and of_today(written) == today


def test_fields_of_a_newer_operator_are_refused_until_a_job_is_accepted() -> None:
    manifest = job()
    manifest["spec"]["trainer"][ADDED] = {"size": 1}
    assert not is_accepted(manifest)
    with pytest.raises(ValidationError, match=f"trainer.{ADDED}"):
        spec_of(GRPOJobSpec, manifest, False, {})
    pending = refused_status(manifest, "InvalidSpec", "no such field", NOW).wire()
    assert not is_accepted(manifest | {"status": pending})


LATER = {
    "type": "object", "default": {"size": 1},
    "properties": {"size": {"type": "integer"}, "unit": {"type": "string", "default": "Gi"}},
}  # fmt: skip
SERVED = {
    "properties": {
        ADDED: {"type": "array", "items": {"type": "integer"}, "default": [2, 3]},
        "trainer": {"properties": {ADDED: LATER}},
        "validation": {"properties": {"sets": {"items": {"properties": {ADDED: {"default": False}}}}}},
    }
}


@pytest.mark.parametrize(
    ("value", "named"),
    [({"size": 1, "unit": "Gi"}, False), ({"size": 1}, False), ({"size": 2}, True), (None, True)],
)
def test_defaults_of_newer_crds_are_no_reason_to_refuse_a_job(value: Any, named: bool) -> None:
    manifest = job()
    sets = [{"name": "gcd", "data": "reasoning-gym:gcd", ADDED: False}]
    manifest["spec"] |= {ADDED: [2, 3], "validation": {"sets": sets}}
    manifest["spec"]["trainer"][ADDED] = value
    if named:
        with pytest.raises(ValidationError, match=f"trainer.{ADDED}") as raised:
            spec_of(GRPOJobSpec, manifest, False, {GRPOJobSpec: SERVED})
        assert raised.value.error_count() == 1, "a default is not named"
        return
    spec = spec_of(GRPOJobSpec, manifest, False, {GRPOJobSpec: SERVED})
    assert spec == spec_of(GRPOJobSpec, manifest, True, {}), "acceptance changes nothing that pods read"
    assert spec.wire()["trainer"][ADDED] == value
    with pytest.raises(ValidationError, match=ADDED):
        spec_of(GRPOJobSpec, manifest, False, {GRPOJobSpec: {}})


def test_an_accepted_job_goes_on_with_fields_that_only_a_newer_operator_knows() -> None:
    manifest = _accepted()
    before = _rendered(manifest, A)
    manifest["spec"]["trainer"][ADDED] = {"size": 1}
    manifest["spec"]["rollout"]["template"]["engine"][ADDED] = True
    assert is_accepted(manifest) and _rendered(manifest, A) == before
    spec, layout = spec_of(GRPOJobSpec, manifest, True, {}), settled_layout(manifest)
    assert layout is not None
    status = job_status(manifest, spec, layout, pool_of(spec), running(), NOW)
    assert status.phase == "Training"
    ignored = {condition.type: condition for condition in status.conditions}["FieldsIgnored"]
    assert ignored.reason == "OlderOperator"
    assert f"spec.trainer.{ADDED}, spec.rollout.template.engine.{ADDED}: upgrade" in ignored.message


def test_a_value_that_is_invalid_is_refused_for_accepted_jobs_too() -> None:
    manifest = _accepted()
    manifest["spec"]["totalSteps"] = 0
    with pytest.raises(ValidationError, match="totalSteps"):
        spec_of(GRPOJobSpec, manifest, is_accepted(manifest), {})


def test_settings_differ_in_their_images_only() -> None:
    other = replace(B, image_pull_policy="Always")
    assert other.with_images(A.images) == replace(A, image_pull_policy="Always")


def _key_volumes(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    templates = [group["template"] for group in cluster["spec"]["workerGroupSpecs"]]
    return [volume for t in templates for volume in t["spec"]["volumes"] if volume["name"] == "key"]


def _variables(cluster: dict[str, Any]) -> set[str]:
    templates = [group["template"]["spec"] for group in cluster["spec"]["workerGroupSpecs"]]
    containers = [c for t in templates for c in (*t["containers"], *t.get("initContainers", []))]
    return {
        v["name"]
        for c in containers
        for v in c["env"]
        if v["name"].startswith("GRPO_") and "KEY" in v["name"]
    }


def test_a_job_of_an_operator_without_keys_of_jobs_keeps_the_key_of_the_namespace() -> None:
    manifest = _accepted()
    del manifest["status"]["layout"]["images"]["keyScope"]
    live = _rendered(manifest, A)
    assert {str(v) for v in _key_volumes(live)} == {
        str({"name": "key", "secret": {"secretName": "grpo-agents"}})
    }
    assert _variables(live) == {"GRPO_KEY_FILE"}
    assert settled_images(None, live, B.images).key_scope == "namespace", "also without images in its status"
    new = _rendered(_accepted(), A)
    assert "grpo-agents'" not in str(new) and settled_images(None, new, B.images).key_scope == "owner"


def test_a_new_job_mounts_its_own_key_and_the_epochs() -> None:
    live = _rendered(_accepted(), A)
    names = {s["secret"]["name"] for v in _key_volumes(live) for s in v["projected"]["sources"]}
    assert names == {f"{job()['metadata']['name']}-{job()['metadata']['uid'][:8]}-key", "grpo-agents-epoch"}
