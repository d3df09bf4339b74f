"""The policy about owners of what the operator writes: its CEL, on objects that the operator renders."""

from typing import Any

import pytest
from celpy.adapter import json_to_cel

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.render.config_map import owned_pool, owned_pool_spec
from grpo_operator.render.ray_cluster import job_cluster
from grpo_operator.render.store_removal import removal_pod
from support.cel import changed, program
from support.chart import of, render
from support.manifests import SETTINGS, UID

Made = dict[str, Any]
META = {"name": "tiny", "namespace": "default", "uid": UID}
JOB: Made = {"apiVersion": "rl.grpo.dev/v1alpha1", "kind": "GRPOJob", "metadata": META}
FOREIGN = {"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "1"}


def _made(*changes: Made) -> dict[str, Made]:
    """Return an object of each kind that another controller acts on."""
    spec = GRPOJobSpec.model_validate(changed(*changes))
    engines = owned_pool_spec(spec)
    assert engines is not None
    return {
        "RayCluster": job_cluster(JOB, spec, spec.rollout.template, SETTINGS, False).wire(),
        "Pod": removal_pod(JOB, spec, SETTINGS),
        "RolloutPool": owned_pool(JOB, engines),
    }


def _accepts(made: Made, old: Made | None = None) -> bool:
    """Return whether the validation about owners holds for the creation or change of an object."""
    policy = "ops-jobs" if made["kind"] == "RolloutPool" else "ops-children"
    (found,) = of(render(), "ValidatingAdmissionPolicy", policy)
    (cel,) = [v["expression"] for v in found["spec"]["validations"] if "only owner" in v["message"]]
    assert "oldObject != null" in cel
    cel = cel.replace("oldObject != null", str(old is not None).lower())  # celpy compares no map with null
    request = {"kind": {"kind": made["kind"]}}
    given = {"object": made, "oldObject": old, "request": request}
    return bool(program(cel).evaluate({name: json_to_cel(value) for name, value in given.items()}))


def _owned_by(made: Made, *owners: Made) -> Made:
    return made | {"metadata": made["metadata"] | {"ownerReferences": list(owners)}}


@pytest.mark.parametrize("kind", ["RayCluster", "Pod", "RolloutPool"])
def test_objects_of_jobs_are_accepted_and_others_are_not(kind: str) -> None:
    made = _made()[kind]
    (owner,) = made["metadata"]["ownerReferences"]
    assert _accepts(made)
    for owners in ((), (FOREIGN,), (owner, FOREIGN)):
        assert not _accepts(_owned_by(made, *owners)), owners


def test_a_change_keeps_the_owners() -> None:
    made = _made()["RayCluster"]
    (owner,) = made["metadata"]["ownerReferences"]
    adopted = _owned_by(made, owner, FOREIGN)
    assert _accepts(adopted, adopted), "somebody else has added one"
    assert _accepts(made, adopted) and not _accepts(adopted, made)
    assert not _accepts(_owned_by(made), made)


def test_only_a_ray_cluster_of_kai_is_without_an_owner() -> None:
    made = _made({"scheduling.gangScheduler": "kai"})
    cluster = made["RayCluster"]
    assert "ownerReferences" not in cluster["metadata"] and _accepts(cluster)
    assert not _accepts(cluster | {"kind": "ConfigMap"})
    for part in ("annotations", "labels"):
        rest = {name: value for name, value in cluster["metadata"].items() if name != part}
        assert not _accepts(cluster | {"metadata": rest}), part
    assert not _accepts(_owned_by(cluster, FOREIGN))
