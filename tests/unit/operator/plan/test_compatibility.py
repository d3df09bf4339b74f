"""What the operator compares: live objects with manifests, KubeRay's and its own CRDs with its needs."""

import pytest

from grpo_operator.api.crd import grpojob_crd
from grpo_operator.plan.compatibility.crds import lacking
from grpo_operator.plan.compatibility.kuberay import shortcoming
from grpo_operator.render.metadata import covers, is_current, with_hash

MANIFEST = {"metadata": {"name": "a"}, "spec": {"replicas": 2, "groups": [{"name": "x", "n": 1}]}}


def test_defaults_and_other_peoples_labels_are_no_drift() -> None:
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
def test_a_changed_or_missing_value_is_drift_but_not_of_what_users_may_change(spec: object) -> None:
    made = with_hash(MANIFEST)
    live = {"metadata": made["metadata"], "spec": spec}
    assert not covers(live, made) and not is_current(made, live)
    assert is_current(made, live, shared=True)


def test_a_value_that_is_no_longer_wanted_is_drift() -> None:
    live = with_hash(MANIFEST)
    less = {"metadata": {"name": "a"}, "spec": {"replicas": 2}}
    assert covers(live, less) and not is_current(with_hash(less), live)


def test_kuberay_is_known_by_its_fields() -> None:
    old, new = {"suspend", "authOptions"}, {"suspend", "authOptions", "upgradeStrategy"}
    assert shortcoming(new, "Recreate") is None and shortcoming(old, "None") is None
    for fields, strategy, reason in (
        (set(), "None", "KubeRayMissing"),
        ({"suspend"}, "None", "KubeRayTooOld"),
        (old, "Recreate", "KubeRayTooOld"),
    ):
        found = shortcoming(fields, strategy)
        assert found is not None and found[0] == reason and "install" in found[1]


def test_an_older_crd_lacks_named_fields() -> None:
    wanted = grpojob_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert lacking("GRPOJob", wanted, wanted) == ""
    older = {"properties": {"spec": wanted["properties"]["spec"], "status": {"properties": {}}}}
    text = lacking("GRPOJob", older, {"properties": {"status": wanted["properties"]["status"]}})
    assert "status.phase" in text and "more" in text and "kubectl apply --server-side" in text
