"""Comparison of live objects with manifests, and of installed CRDs with the required fields."""

import pytest

from grpo_operator.api.crd import grpojob_crd, structural
from grpo_operator.api.v1alpha1.status import GRPOJobStatus
from grpo_operator.plan.compatibility import crd_problem, declared, kuberay_problem
from grpo_operator.render.metadata import covers, is_current, with_hash

MANIFEST = {"metadata": {"name": "a"}, "spec": {"replicas": 2, "groups": [{"name": "x", "n": 1}]}}


def test_defaults_and_labels_of_others_are_not_drift() -> None:
    made = with_hash(MANIFEST)
    live = {
        "metadata": made["metadata"] | {"labels": {"team": "rl"}, "uid": "1"},
        "spec": {"replicas": 2, "groups": [{"name": "x", "n": 1, "policy": "Default"}], "paused": False},
    }
    assert is_current(made, live)


@pytest.mark.parametrize(
    "spec",
    [
        {"replicas": 3, "groups": [{"name": "x", "n": 1}]},
        {"replicas": 2, "groups": [{"name": "x"}]},
        {"replicas": 2, "groups": []},
        {"replicas": 2, "groups": None},
        {"groups": [{"name": "x", "n": 1}]},
    ],
)
def test_changed_values_are_drift_except_in_shared_objects(spec: object) -> None:
    made = with_hash(MANIFEST)
    live = {"metadata": made["metadata"], "spec": spec}
    assert not covers(live, made) and not is_current(made, live)
    assert is_current(made, live, shared=True)


def test_a_value_that_is_no_longer_rendered_is_drift() -> None:
    live = with_hash(MANIFEST)
    less = {"metadata": {"name": "a"}, "spec": {"replicas": 2}}
    assert covers(live, less) and not is_current(with_hash(less), live)


def test_kuberay_versions_are_detected_by_their_fields() -> None:
    old, new = {"suspend", "authOptions"}, {"suspend", "authOptions", "upgradeStrategy"}
    assert kuberay_problem(new, "Recreate") is None and kuberay_problem(old, "None") is None
    for fields, strategy, reason in (
        (set(), "None", "KubeRayMissing"),
        ({"suspend"}, "None", "KubeRayTooOld"),
        (old, "Recreate", "KubeRayTooOld"),
    ):
        problem = kuberay_problem(fields, strategy)
        assert problem is not None and problem[0] == reason and "install" in problem[1]


def test_an_older_crd_lacks_named_fields() -> None:
    wanted = grpojob_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert crd_problem("GRPOJob", wanted, wanted) == ""
    older = {"properties": {"spec": wanted["properties"]["spec"], "status": {"properties": {}}}}
    text = crd_problem("GRPOJob", older, {"properties": {"status": wanted["properties"]["status"]}})
    assert "status.phase" in text and "more" in text and "kubectl apply --server-side" in text


def test_a_status_is_cut_to_what_an_older_crd_declares() -> None:
    schema = structural(GRPOJobStatus)
    status = {
        "phase": "Training",
        "layout": {"world": 2, "stages": [1, 1], "images": {"trainer": "t", "rollout": "r"}},
        "conditions": [{"type": "Ready", "status": "True", "message": ""}],
    }
    assert declared(status, schema) == status and declared(status, {}) == status
    del schema["properties"]["layout"]["properties"]["images"]
    del schema["properties"]["conditions"]["items"]["properties"]["message"]
    cut = declared(status, schema)
    assert cut["layout"] == {"world": 2, "stages": [1, 1]}
    assert cut["conditions"] == [{"type": "Ready", "status": "True"}]
