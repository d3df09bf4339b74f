"""RolloutPools without a job: engines of their own, bound by jobs in turn, scaled, deleted."""

import json
import time
from typing import Any

import pytest

from support.api_server import POOL, Api, lose_controller, until

ENGINES = "rl.grpo.dev/rolloutpool=shared"


def _shared(tiny: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Return a pool like the tiny job's own."""
    template = tiny["spec"]["rollout"]["template"]
    return {
        "apiVersion": tiny["apiVersion"],
        "kind": "RolloutPool",
        "metadata": {"name": "shared", "namespace": "default"},
        "spec": template | {"model": tiny["spec"]["model"]} | spec,
    }


def _referring(tiny: dict[str, Any], name: str) -> dict[str, Any]:
    spec = tiny["spec"] | {"rollout": {"poolRef": {"name": "shared"}}}
    return tiny | {"metadata": {"name": name}, "spec": spec}


def _pods(api: Api, selector: str) -> dict[str, str]:
    """Return name -> UID of running pods."""
    items = api.get("pods", "-l", selector)["items"]
    return {p["metadata"]["name"]: p["metadata"]["uid"] for p in items if p["status"]["phase"] == "Running"}


def _reason(api: Api, kind: str, name: str) -> str:
    conditions = api.get(kind, name).get("status", {}).get("conditions", [])
    return str(conditions[0]["reason"]) if conditions else ""


def _bound(api: Api) -> str | None:
    bound: str | None = api.get("rpool", "shared").get("status", {}).get("boundTo")
    return bound


def test_jobs_write_to_a_pool_in_turn_and_its_engines_remain(
    api: Api, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(3)
    assert api.apply(_shared(tiny)).returncode == 0
    until("engines", lambda: len(_pods(api, f"{ENGINES},{POOL}=rollout")) == 2, 60)
    engines = _pods(api, ENGINES)
    assert api.apply(_referring(tiny, "first")).returncode == 0
    until("the first job is bound", lambda: _bound(api) == "first", 30)
    until("its pods", lambda: len(_pods(api, "rl.grpo.dev/job=first")) == 4, 60)
    assert api.apply(_referring(tiny, "second")).returncode == 0
    until("the second waits", lambda: _reason(api, "grpo", "second") == "WaitingForPool", 30)
    assert _pods(api, "rl.grpo.dev/job=second") == {}
    assert api.get("grpo", "first")["status"]["rollout"]["total"] == 2
    api.ok("delete", "grpo", "first")
    until("the second is bound", lambda: _bound(api) == "second", 60)
    until("its pods", lambda: len(_pods(api, "rl.grpo.dev/job=second")) == 4, 60)
    assert _pods(api, ENGINES) == engines, "the engines were replaced"
    events = api.ok("get", "events", "--field-selector=involvedObject.kind=RolloutPool")
    assert "weights come from GRPOJob second" in events


def test_a_suspended_job_lets_go_of_the_pool(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(3)
    assert api.apply(_shared(tiny)).returncode == 0
    first = _referring(tiny, "first")
    assert api.apply(first).returncode == 0
    until("bound", lambda: _bound(api) == "first" and len(_pods(api, "rl.grpo.dev/job=first")) == 4, 60)
    assert api.apply(_referring(tiny, "second")).returncode == 0
    first["spec"]["suspend"] = True
    assert api.apply(first).returncode == 0
    assert _bound(api) == "first", "still saving its checkpoint"
    lose_controller(api, "first")
    until("the second is bound", lambda: _bound(api) == "second", 60)


def test_a_pool_scales_and_everything_goes_with_it(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(3)
    assert api.apply(_shared(tiny)).returncode == 0
    until("engines", lambda: len(_pods(api, f"{ENGINES},{POOL}=rollout")) == 2, 60)
    api.ok("scale", "rpool", "shared", "--replicas=4")
    until("four engines", lambda: len(_pods(api, f"{ENGINES},{POOL}=rollout")) == 4, 60)
    until("status", lambda: api.get("rpool", "shared")["status"]["replicas"] == 4, 30)
    api.ok("delete", "rpool", "shared")
    kinds = "pods,services,rayclusters,poddisruptionbudgets,networkpolicies"
    until("nothing is left", lambda: not api.ok("get", kinds, "-l", ENGINES, "-o", "name"), 60)


@pytest.mark.slow
def test_an_autoscaler_finds_and_scales_a_pool(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    """Below its minimum a HorizontalPodAutoscaler scales without metrics."""
    fake_nodes(3)
    assert api.apply(_shared(tiny)).returncode == 0
    until("engines", lambda: len(_pods(api, f"{ENGINES},{POOL}=rollout")) == 2, 60)
    scaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "shared"},
        "spec": {
            "scaleTargetRef": {"apiVersion": tiny["apiVersion"], "kind": "RolloutPool", "name": "shared"},
            "minReplicas": 3,
            "maxReplicas": 4,
        },
    }
    try:
        assert api.apply(scaler).returncode == 0
        until("three engines", lambda: len(_pods(api, f"{ENGINES},{POOL}=rollout")) == 3, 90)
        assert api.get("rpool", "shared")["spec"]["replicas"] == 3
    finally:
        api.ok("delete", "hpa", "shared")


def test_a_pool_that_serves_a_model_has_service_and_key_and_takes_no_job(
    api: Api, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(3)
    served = _shared(tiny, model={"path": "/models/export"}, serve={"modelName": "policy"})
    assert api.apply(served).returncode == 0
    until("engines", lambda: len(_pods(api, f"{ENGINES},{POOL}=rollout")) == 2, 60)
    until("status", lambda: api.get("rpool", "shared")["status"].get("serve"), 30)
    status = api.get("rpool", "shared")["status"]
    assert status["serve"]["url"] == "http://shared-serve.default.svc"
    (port,) = api.get("service", "shared-serve")["spec"]["ports"]
    assert (port["name"], port["port"], port["targetPort"]) == ("http", 80, 30000)
    assert api.get("secret", status["serve"]["secretName"])["data"].keys() == {"api-key"}
    assert "/models/export" in api.ok("get", "rpool", "shared")
    assert api.apply(_referring(tiny, "first")).returncode == 0
    until("refused", lambda: _reason(api, "grpo", "first") == "PoolServes", 30)
    assert _bound(api) is None and _pods(api, "rl.grpo.dev/job=first") == {}
    served["spec"]["model"]["path"] = "/models/other"
    assert "model is fixed once a pool serves it" in api.apply(served).stderr


def test_what_cannot_be_bound_is_said(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(3)
    assert api.apply(_referring(tiny, "lost")).returncode == 0
    until("no such pool", lambda: _reason(api, "grpo", "lost") == "PoolNotFound", 30)
    other = _shared(tiny, model={"path": "/models/other"})
    assert api.apply(other).returncode == 0
    until("another model", lambda: _reason(api, "grpo", "lost") == "PoolMismatch", 30)
    assert api.apply(tiny).returncode == 0
    until("the job's own pool", lambda: api.exists("rpool", "tiny-moe-rollout"), 30)
    thief = _referring(tiny, "thief")
    thief["spec"]["rollout"] = {"poolRef": {"name": "tiny-moe-rollout"}}
    assert api.apply(thief).returncode == 0
    until("owned by a job", lambda: _reason(api, "grpo", "thief") == "PoolOwned", 30)
    assert _pods(api, "rl.grpo.dev/job=thief") == _pods(api, "rl.grpo.dev/job=lost") == {}


def test_a_name_that_is_taken_is_refused_and_nothing_is_overwritten(
    api: Api, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(3)
    pool = _shared(tiny)
    pool["metadata"]["name"] = "tiny-moe-rollout"
    assert api.apply(pool).returncode == 0
    until("its RayCluster", lambda: api.exists("raycluster", "tiny-moe-rollout"), 30)
    assert api.apply(tiny).returncode == 0
    until("refused", lambda: _reason(api, "grpo", "tiny-moe") == "NameTaken", 30)
    assert api.apply(tiny | {"metadata": {"name": "tiny-moe-rollout"}}).returncode == 0
    until("refused", lambda: _reason(api, "grpo", "tiny-moe-rollout") == "NameTaken", 30)
    owners = api.get("raycluster", "tiny-moe-rollout")["metadata"]["ownerReferences"]
    assert [owner["kind"] for owner in owners] == ["RolloutPool"]


def test_an_ended_job_stays_ended_when_its_pool_goes(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(3)
    assert api.apply(_shared(tiny)).returncode == 0
    assert api.apply(_referring(tiny, "first")).returncode == 0
    until("its pods", lambda: len(_pods(api, "rl.grpo.dev/job=first")) == 4, 60)
    steps = tiny["spec"]["totalSteps"]
    ended = json.dumps({"status": {"phase": "Succeeded", "step": steps}})
    api.ok("patch", "grpo", "first", "--subresource=status", "--type=merge", "-p", ended)
    api.ok("delete", "rpool", "shared")
    until("its pods go", lambda: not _pods(api, "rl.grpo.dev/job=first"), 60)
    time.sleep(3)
    status = api.get("grpo", "first")["status"]
    assert (status["phase"], status["step"]) == ("Succeeded", steps)


def test_kai_clusters_are_deleted_with_their_job_without_an_owner(
    api: Api, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(2)
    tiny["spec"]["scheduling"] = {"gangScheduler": "kai"}
    assert api.apply(tiny).returncode == 0
    until("the RayCluster", lambda: api.exists("raycluster", "tiny-moe"), 30)
    assert "ownerReferences" not in api.get("raycluster", "tiny-moe")["metadata"]
    api.ok("delete", "grpo", "tiny-moe")
    until("it is swept", lambda: api.run("get", "raycluster", "tiny-moe").returncode != 0, 60)


@pytest.mark.fault(
    row="7",
    point="a node gets a taint of a sick GPU and is cordoned",
    witness="event that names node and taint",
    bound="60 s",
    partial="simulated nodes; nothing compared",
)
def test_pods_leave_an_unhealthy_cordoned_node(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    tiny["spec"]["scheduling"] = {"unhealthyNodes": {"taints": ["gpu/xid"]}}
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: len(_pods(api, "rl.grpo.dev/job=tiny-moe")) == 6, 60)
    victim = api.get("pods", "-l", f"{POOL}=trainer")["items"][0]
    node = victim["spec"]["nodeName"]
    moved = {p["metadata"]["uid"] for p in api.get("pods")["items"] if p["spec"]["nodeName"] == node}
    api.ok("taint", "node", node, "gpu/xid=79:PreferNoSchedule")
    api.ok("cordon", node)

    def elsewhere() -> bool:
        pods = api.get("pods")["items"]
        return len(pods) == 6 and all(p["spec"].get("nodeName") not in (None, node) for p in pods)

    until("pods run on the other node", elsewhere, 60)
    assert moved and not moved & {p["metadata"]["uid"] for p in api.get("pods")["items"]}
    assert f"leaves node {node}: taint gpu/xid" in api.ok("get", "events")
