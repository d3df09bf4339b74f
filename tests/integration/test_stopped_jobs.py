"""Changes of what a job's pods ask for: refused while it runs, taken over by the pods of a stopped job."""

import json
from typing import Any

import pytest

from support.api_server import POOL, WHOLE, Api, lose_controller, running, until

CHANGES: dict[str, Any] = {
    "resources": {"cpu": "300m", "memory": "5Gi"},
    "agentResources": {"memory": "768Mi"},
    "nodeSelector": {"kubernetes.io/os": "linux"},
    "podTemplate": {"metadata": {"labels": {"team": "rl"}}},
    "evictionSeconds": 77,
}


def _patch(api: Api, **spec: Any) -> Any:
    return api.run("patch", "grpojob", "tiny-moe", "--type=merge", "-p", json.dumps({"spec": spec}))


def _refused(api: Api, field: str, value: Any) -> str:
    done = _patch(api, trainer={field: value})
    assert done.returncode != 0 and "spec.trainer" in done.stderr, (field, done.stderr)
    return str(done.stderr)


def _phase(api: Api) -> str:
    return str(api.get("grpojob", "tiny-moe").get("status", {}).get("phase"))


def _pods(api: Api, pool: str) -> list[dict[str, Any]]:
    pods: list[dict[str, Any]] = api.get("pods", "-l", f"{POOL}={pool}")["items"]
    return pods


def _memory(pod: dict[str, Any], container: str) -> str:
    spec = pod["spec"]
    (found,) = [c for c in [*spec["containers"], *spec["initContainers"]] if c["name"] == container]
    assert found["resources"]["limits"]["memory"] == found["resources"]["requests"]["memory"]
    return str(found["resources"]["limits"]["memory"])


def _uncordon(api: Api) -> None:
    names = api.ok("get", "nodes", "-o", "name").split()
    api.ok("uncordon", *(name.removeprefix("node/") for name in names))


def _run(api: Api, tiny: dict[str, Any]) -> set[str]:
    """Start the job; return the UIDs of its pods."""
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 90)
    return {pod["metadata"]["uid"] for pod in api.get("pods")["items"]}


def _check_trainers(api: Api, before: set[str]) -> None:
    until("all pods run", lambda: running(api) == WHOLE, 90)
    assert not before.intersection(pod["metadata"]["uid"] for pod in api.get("pods")["items"])
    for pod in _pods(api, "trainer"):
        assert (_memory(pod, "ray-worker"), _memory(pod, "agent")) == ("5Gi", "768Mi")
        assert pod["spec"]["nodeSelector"]["kubernetes.io/os"] == "linux"
        assert pod["metadata"]["labels"]["team"] == "rl"
        assert 77 in {taint.get("tolerationSeconds") for taint in pod["spec"]["tolerations"]}


def test_a_running_job_refuses_and_a_suspended_one_resumes_with_other_pods(
    api: Api, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(2)
    api.ok("label", "nodes", "--all", "kubernetes.io/os=linux", "--overwrite")
    before = _run(api, tiny)
    until("the phase", lambda: _phase(api) == "Starting")
    for field, value in CHANGES.items():
        assert "set suspend to true" in _refused(api, field, value)
    assert "set suspend to true" in _patch(api, suspend=True, trainer=CHANGES).stderr, "it still has its pods"

    lose_controller(api, "tiny-moe")
    assert _patch(api, suspend=True).returncode == 0
    until("Suspended", lambda: _phase(api) == "Suspended", 60)
    assert "trainer is fixed once the job exists" in _refused(api, "nodes", 1)
    # Those of the other pods are free at any time. Pods that exist stay as they are.
    tolerated = {"key": "gpu", "operator": "Exists"}
    others = {
        "controller": {"resources": {"memory": "3Gi"}},
        "head": {"resources": {"memory": "2Gi"}},
        "scheduling": {"tolerations": [tolerated]},
        "rollout": {"template": {"resources": {"memory": "6Gi"}}},
    }
    assert _patch(api, **others).returncode == 0
    until("the engines' memory", lambda: '"memory": "6Gi"' in api.ok("get", "raycluster", "-o", "json"))
    done = _patch(api, suspend=False, trainer=CHANGES)
    assert done.returncode == 0, done.stderr
    _uncordon(api)
    _check_trainers(api, before)
    for pool, container, memory in (("controller", "controller", "3Gi"), ("rollout", "engine", "6Gi")):
        assert {_memory(pod, container) for pod in _pods(api, pool)} == {memory}
    for pod in api.get("pods")["items"]:
        assert any(taint.get("key") == "gpu" for taint in pod["spec"]["tolerations"])
    (head,) = _pods(api, "head")
    assert head["spec"]["containers"][0]["resources"]["requests"]["memory"] == "2Gi"
    until("the phase", lambda: _phase(api) != "Suspended")
    assert "set suspend to true" in _refused(api, "resources", {"memory": "6Gi"})


def test_a_failed_job_is_resumed_with_other_pods(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    api.ok("label", "nodes", "--all", "kubernetes.io/os=linux", "--overwrite")
    before = _run(api, tiny)
    failed = '{"status": {"phase": "Failed"}}'
    api.ok("patch", "grpojob", "tiny-moe", "--subresource=status", "--type=merge", "-p", failed)
    until("its pods are gone", lambda: not api.get("pods")["items"], 60)
    done = _patch(api, trainer=CHANGES)
    assert done.returncode == 0, done.stderr
    api.ok("annotate", "grpojob", "tiny-moe", "rl.grpo.dev/resume=more memory")
    _check_trainers(api, before)


@pytest.mark.parametrize(
    ("field", "wrong", "right"),
    [("resources", {"memory": "9Ti"}, {"memory": "5Gi"}), ("nodeSelector", {"disk": "none"}, None)],
)
def test_a_job_that_fits_no_node_is_corrected(
    api: Api, tiny: dict[str, Any], fake_nodes: Any, field: str, wrong: Any, right: Any
) -> None:
    fake_nodes(2)
    tiny["spec"]["trainer"][field] = wrong
    assert api.apply(tiny).returncode == 0
    until("Invalid", lambda: _phase(api) == "Invalid", 30)
    done = _patch(api, trainer={field: right})
    assert done.returncode == 0, done.stderr
    until("all pods run", lambda: running(api) == WHOLE, 90)
