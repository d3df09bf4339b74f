"""Objects of others that have a name which a job needs, and drains of pods that are not ready."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from support.api_server import POOL, WHOLE, Api, running, stalled, until

_PORT = {"port": 80}
_POD = {"spec": {"containers": [{"name": "ray", "image": "x"}]}}
_CLUSTER = {"headGroupSpec": {"rayStartParams": {}, "template": _POD}, "suspend": True}
FOREIGN: dict[str, tuple[str, str, dict[str, Any]]] = {
    "RayCluster": ("ray.io/v1", "tiny-moe", {"spec": _CLUSTER}),
    "NetworkPolicy": ("networking.k8s.io/v1", "tiny-moe", {"spec": {"podSelector": {}}}),
    "ConfigMap": ("v1", "tiny-moe-job", {"data": {"mine": "1"}}),
    "Service": ("v1", "tiny-moe-rollout", {"spec": {"ports": [_PORT]}}),
    "PodDisruptionBudget": ("policy/v1", "tiny-moe-trainer", {"spec": {"minAvailable": 1}}),
}


# One code writes all kinds: ``make test`` runs one of them.
@pytest.mark.parametrize(
    "kind",
    ["RayCluster", *(pytest.param(kind, marks=pytest.mark.slow) for kind in FOREIGN if kind != "RayCluster")],
)
def test_an_object_of_somebody_else_is_not_overwritten(
    api: Api, tiny: dict[str, Any], fake_nodes: Callable[[int], None], kind: str
) -> None:
    fake_nodes(2)
    version, name, content = FOREIGN[kind]
    manifest = {"apiVersion": version, "kind": kind, "metadata": {"name": name}, **content}
    api.ok("create", "-f", "-", stdin=yaml.safe_dump(manifest))
    before = api.get(kind, name)
    assert api.apply(tiny).returncode == 0
    until("the job says so", lambda: stalled(api, "tiny-moe").get("reason") == "NameTaken", 60)
    message = stalled(api, "tiny-moe")["message"]
    assert message.startswith(f"{kind} {name} exists already") and "choose another name" in message
    after = api.get(kind, name)
    assert (after["spec" if "spec" in after else "data"], after["metadata"]) == (
        before["spec" if "spec" in before else "data"], before["metadata"],
    )  # fmt: skip
    api.ok("delete", kind, name)
    until("all pods run", lambda: running(api) == WHOLE, 60)
    until("the job is no longer stalled", lambda: stalled(api, "tiny-moe") == {}, 30)


def test_a_child_without_its_label_is_still_a_child(
    api: Api, tiny: dict[str, Any], fake_nodes: Callable[[int], None]
) -> None:
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    label = "rl.grpo.dev/job"
    api.ok("label", "configmap", "tiny-moe-job", f"{label}-")

    def labelled() -> bool:
        return label in (api.get("configmap", "tiny-moe-job")["metadata"].get("labels") or {})

    until("the label is back", labelled, 30)
    assert stalled(api, "tiny-moe") == {}


def test_a_training_pod_that_is_not_ready_does_not_block_a_drain(
    api: Api, tiny: dict[str, Any], fake_nodes: Callable[[int], None]
) -> None:
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    until("the budget exists", lambda: api.exists("pdb", "tiny-moe-trainer"), 30)
    pod = api.get("pods", "-l", f"{POOL}=trainer")["items"][0]["metadata"]["name"]
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": "default"},
    }
    path = f"/api/v1/namespaces/default/pods/{pod}/eviction"
    refused = api.run("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction))
    assert "disruption budget" in refused.stderr, "a ready training pod is protected"
    condition = '{"status":{"conditions":[{"type":"Ready","status":"False"}]}}'
    api.ok("patch", "pod", pod, "--subresource=status", "--type=strategic", "-p", condition)
    until(
        "the pod may be evicted",
        lambda: api.run("create", "--raw", path, "-f", "-", stdin=json.dumps(eviction)).returncode == 0,
        30,
    )
