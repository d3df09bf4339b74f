"""Another operator leaves the pods of accepted jobs and pools as they are."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import yaml

from grpo_operator.api.base import Resources
from grpo_operator.api.names import PARTS_ANNOTATION
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec, RolloutTemplate
from grpo_operator.api.weight_path import WeightPath
from grpo_operator.plan.capacity.topology import Leaves
from grpo_operator.plan.planner.resources import completed_pool
from grpo_operator.render import accepted_clusters, pod_template, ray_cluster
from grpo_operator.render.accepted_clusters import (
    JobSources,
    Places,
    accepted_job,
    accepted_pool_cluster,
)
from grpo_operator.render.config_map import job_config_map
from grpo_operator.render.kept_parts import Record
from grpo_operator.settings import OperatorSettings
from support.objects import MANIFEST, job, pool_of
from support.releases import ADDED

A = OperatorSettings("t:a", "r:a")
OVERLAY = {"env": [{"name": "HTTPS_PROXY", "value": "http://proxy"}]}
B = replace(A, image_pull_policy="Always", pod_overlay=OVERLAY, scrape_namespace="metrics")
LARGE = yaml.safe_load((MANIFEST.parent / "deepseek-v3-512xh100.yaml").read_text())


class Rendered:
    """The children of a job that run something, as one operator makes them of what is live."""

    def __init__(self, manifest: dict[str, Any], settings: OperatorSettings, live: "Rendered | None" = None,
                 places: Places | None = None) -> None:  # fmt: skip
        spec = GRPOJobSpec.of_any_release(manifest["spec"])
        pool = pool_of(spec)
        seen: str | None = live.record if live else None
        sources = JobSources(spec, pool, True, places or Places())
        cluster, path, own, accepted = accepted_job(manifest, sources, settings, False, seen)
        self.cluster, self.pool = cluster.wire(), own or {}
        config = job_config_map(manifest, spec, "engines", pool, path, accepted=accepted)
        self.config = config["data"]["job.json"]
        self.record: str | None = self.cluster["metadata"]["annotations"][PARTS_ANNOTATION]

    @property
    def groups(self) -> dict[str, dict[str, Any]]:
        return {group["groupName"]: group for group in self.cluster["spec"]["workerGroupSpecs"]}

    def template(self, group: str) -> dict[str, Any]:
        return dict(self.groups[group]["template"])


@pytest.fixture
def another_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the operator render other commands, and choose another path of the weights."""
    monkeypatch.setattr(pod_template, "PYTHON", "python9")
    monkeypatch.setattr(ray_cluster, "RAY_VERSION", "9.0.0")
    monkeypatch.setattr(accepted_clusters, "job_weight_path", lambda *_: WeightPath(staged="nixl"))


@pytest.mark.parametrize("manifest", [job(), job() | LARGE | {"metadata": job()["metadata"]}])
def test_an_operator_with_other_settings_changes_nothing(manifest: dict[str, Any]) -> None:
    live = Rendered(manifest, A)
    upgraded = Rendered(manifest, B, live)
    assert upgraded.cluster == live.cluster and upgraded.config == live.config
    assert Rendered(manifest, B).cluster != live.cluster, "a new job gets the new settings"


@pytest.mark.usefixtures("another_release")
def test_another_release_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    new = Rendered(job(), A)
    assert "python9 -m grpo_worker" in str(new.cluster) and '"staged": "nixl"' in new.config
    monkeypatch.undo()
    live = Rendered(job(), A)
    monkeypatch.setattr(pod_template, "PYTHON", "python9")
    monkeypatch.setattr(ray_cluster, "RAY_VERSION", "9.0.0")
    monkeypatch.setattr(accepted_clusters, "job_weight_path", lambda *_: WeightPath(staged="nixl"))
    upgraded = Rendered(job(), A, live)
    assert upgraded.cluster == live.cluster and upgraded.config == live.config


def test_a_release_with_more_defaults_changes_nothing_and_so_does_one_with_fewer() -> None:
    live = Rendered(job(), A)
    made_of, parts, _ = Record.read(live.record) or pytest.fail("no record")
    unset = ("restartPolicy", "cleanupPolicy")
    older = {key: value for key, value in made_of["spec"].items() if key not in unset}
    newer = made_of["spec"] | {ADDED: 1, "trainer": made_of["spec"]["trainer"] | {ADDED: {"of": 1}}}
    parts["rolloutPool"].pop("resources")  # as if this release had added it, with a default
    for spec in (older, newer):
        live.record = Record.of(made_of | {"spec": spec}, parts).text
        then = Rendered(job(), B, live)
        assert then.record == live.record, "nothing is written"
        assert then.pool == parts["rolloutPool"], "users may have scaled the pool"
        assert then.template("trainer") == live.template("trainer")
        assert json.loads(then.config) == json.loads(live.config) | {"spec": spec}


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec | {"totalSteps": 99},
        lambda spec: spec | {ADDED: 2},
        lambda spec: {key: value for key, value in spec.items() if key != "seed"},
    ],
)
def test_a_changed_spec_reaches_the_pods_of_a_job_of_another_release(
    change: Callable[[dict[str, Any]], dict[str, Any]],
) -> None:
    manifest = job() | {"spec": job()["spec"] | {"seed": 7}}
    live = Rendered(manifest, A)
    made_of, parts, _ = Record.read(live.record) or pytest.fail("no record")
    live.record = Record.of(made_of | {"spec": made_of["spec"] | {ADDED: 1}}, parts).text
    spec = json.loads(Rendered(manifest, B, live).config)["spec"]
    assert (spec["seed"], spec[ADDED]) == (7, 1), "the form of that release"
    changed = manifest | {"spec": change(manifest["spec"])}
    assert Rendered(changed, B, live).config == Rendered(changed, B).config


def test_engines_are_scaled_with_the_pods_that_they_have() -> None:
    live, manifest = Rendered(job(), A), job()
    manifest["spec"]["rollout"]["template"] |= {"replicas": 5, "minAvailable": 4}
    manifest["spec"]["totalSteps"] = 99
    scaled = Rendered(manifest, B, live)
    assert scaled.groups["rollout"]["replicas"] == scaled.pool["replicas"] == 5
    assert scaled.template("rollout") == live.template("rollout")
    assert '"engines": 5' in scaled.config and '"minAvailable": 4' in scaled.config


def test_a_change_of_the_spec_renders_the_parts_that_it_changes() -> None:
    live, manifest = Rendered(job(), A), job()
    manifest["spec"]["rollout"]["template"]["nodeSelector"] = {"zone": "b"}
    changed = Rendered(manifest, B, live)
    assert changed.template("trainer") == live.template("trainer")
    assert changed.template("rollout")["spec"]["nodeSelector"] == {"zone": "b"}
    assert OVERLAY["env"][0] in changed.template("rollout")["spec"]["containers"][0]["env"]
    manifest["spec"]["image"] = "t:own"
    images = Rendered(manifest, A, changed)
    assert images.template("rollout") == changed.template("rollout")
    assert images.template("trainer")["spec"]["containers"][0]["image"] == "t:own"


def test_pods_of_a_stopped_job_get_what_it_asks_for_now() -> None:
    live, manifest = Rendered(job(), A), job()
    wanted = {"resources": {"memory": "9Gi"}, "nodeSelector": {"zone": "b"}}
    manifest["spec"]["trainer"] |= wanted | {"podTemplate": {"metadata": {"labels": {"team": "rl"}}}}
    changed = Rendered(manifest, B, live)
    pod = changed.template("trainer")
    assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == "9Gi"
    assert pod["spec"]["nodeSelector"] == {"zone": "b"} and pod["metadata"]["labels"]["team"] == "rl"
    for group in ("controller", "rollout"):
        assert changed.template(group) == live.template(group)
    assert changed.cluster["spec"]["headGroupSpec"] == live.cluster["spec"]["headGroupSpec"]
    assert Rendered(job(), A, changed).template("trainer") == live.template("trainer")


def test_hosts_in_quarantine_and_leaves_change_pods_with_gpus_only() -> None:
    manifest = job() | LARGE | {"metadata": job()["metadata"]}
    live = Rendered(manifest, A)
    moved = Rendered(manifest, A, live, Places(Leaves(), ("sick-node",)))
    assert "sick-node" in str(moved.template("trainer")) and "sick-node" in str(moved.template("rollout"))
    assert moved.template("controller") == live.template("controller")
    assert Rendered(manifest, B, moved, Places(Leaves(), ("sick-node",))).cluster == moved.cluster
    placed = Places(Leaves(("l1",), (("l2", 3), ("l3", 2)), ("l2",)), ("sick-node",))
    assert Places.read(placed.wire()) == placed


@pytest.mark.parametrize("text", [None, "", "no base64", "bm90aGluZw=="])
def test_without_a_record_everything_is_rendered(text: str | None) -> None:
    live = Rendered(job(), A)
    live.record = text
    assert Rendered(job(), B, live).cluster == Rendered(job(), B).cluster


def test_a_record_that_this_release_cannot_read_is_replaced() -> None:
    live = Rendered(job(), A)
    made_of, parts, _ = Record.read(live.record) or pytest.fail("no record")
    live.record = Record.of(made_of | {"spec": made_of["spec"] | {"mode": "quantum"}}, parts).text
    assert Rendered(job(), B, live).cluster == Rendered(job(), B).cluster


def test_a_pool_of_the_job_is_the_same_source_as_its_template() -> None:
    spec = GRPOJobSpec.model_validate(job()["spec"])
    template = pool_of(spec)
    pool = RolloutPoolSpec.model_validate(template.wire() | {"model": spec.model.wire(), "replicas": 7})
    of = [JobSources(spec, engines, True, Places()) for engines in (template, pool)]
    assert of[0].wire() == of[1].wire()
    assert isinstance(JobSources.read(of[1].wire()).engines, RolloutTemplate)


def _standing_pool(**spec: Any) -> dict[str, Any]:
    body = {"model": {"path": "preset:tiny-moe"}, "engine": {"device": "cpu", "dtype": "float32"}}
    return {
        "apiVersion": "rl.grpo.dev/v1alpha1",
        "kind": "RolloutPool",
        "metadata": job()["metadata"],
        "spec": body | spec,
    }


def test_a_standing_pool_keeps_its_pods_too(monkeypatch: pytest.MonkeyPatch) -> None:
    live = accepted_pool_cluster(_standing_pool(), A, Places(), None)
    seen = live.metadata["annotations"][PARTS_ANNOTATION]
    assert accepted_pool_cluster(_standing_pool(), B, Places(), seen) == live
    plan_more = {"resources": Resources(cpu="9", memory="99Gi")}
    monkeypatch.setattr(
        accepted_clusters, "completed_pool", lambda spec: completed_pool(spec).model_copy(update=plan_more)
    )
    assert accepted_pool_cluster(_standing_pool(), A, Places(), seen) == live, "it keeps what was planned"
    scaled = accepted_pool_cluster(_standing_pool(replicas=3), B, Places(), seen)
    assert scaled.spec.worker_group_specs[0].replicas == 3
    assert scaled.spec.worker_group_specs[0].template == live.spec.worker_group_specs[0].template
    changed = accepted_pool_cluster(_standing_pool(image="r:own"), B, Places(), seen)
    assert "r:own" in str(changed.spec.worker_group_specs[0].template)
    assert changed.spec.head_group_spec == live.spec.head_group_spec


def test_records_are_small() -> None:
    rendered = Rendered(job() | LARGE | {"metadata": job()["metadata"]}, A)
    assert len(rendered.record or "") < 2**13
