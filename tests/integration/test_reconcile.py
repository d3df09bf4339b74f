"""The operator with real KubeRay and the real scheduler; KWOK runs the pods."""

import json
import time
from collections import Counter
from typing import Any

from support.api_server import POOL, WHOLE, Api, lose_controller, running, until


def test_a_job_becomes_one_ray_cluster_with_all_pools(
    api: Api, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    (cluster,) = api.get("rayclusters")["items"]
    assert cluster["metadata"]["ownerReferences"][0]["kind"] == "GRPOJob"
    status = until("status", lambda: api.get("grpojob", "tiny-moe").get("status"))
    assert status["phase"] == "Starting" and status["layout"]["tensor"] == 2
    events = api.ok("get", "events", "--field-selector=involvedObject.kind=GRPOJob")
    assert "Starting" in events


def test_nothing_is_written_while_nothing_changes(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    until("status", lambda: api.get("grpojob", "tiny-moe").get("status", {}).get("trainReady") == "2/2")
    time.sleep(3)

    def versions() -> list[str]:
        kinds = "grpojobs,rolloutpools,rayclusters,configmaps,services"
        items = api.get(kinds, "-l", "rl.grpo.dev/job=tiny-moe")["items"]
        return sorted(i["metadata"]["resourceVersion"] for i in [*items, api.get("grpojob", "tiny-moe")])

    before = versions()
    time.sleep(6)
    assert versions() == before


def test_scaling_the_pool_scales_only_the_engines(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    trainers = {p["metadata"]["uid"] for p in api.get("pods", "-l", f"{POOL}=trainer")["items"]}
    api.ok("scale", "rpool", "tiny-moe-rollout", "--replicas=3")
    until("three engines", lambda: running(api)["rollout"] == 3, 60)
    assert {p["metadata"]["uid"] for p in api.get("pods", "-l", f"{POOL}=trainer")["items"]} == trainers


def test_a_suspended_job_gets_no_pod_and_resumes(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    tiny["spec"]["suspend"] = True
    assert api.apply(tiny).returncode == 0
    until("Suspended", lambda: api.get("grpojob", "tiny-moe").get("status", {}).get("phase") == "Suspended")
    assert api.get("pods")["items"] == []
    assert api.get("poddisruptionbudgets")["items"] == [], "nothing is there to be protected"
    tiny["spec"]["suspend"] = False
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)


def test_a_job_that_waits_for_nodes_starts_when_they_come(
    api: Api, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    tiny["spec"]["trainer"]["resources"] = {"cpu": "40", "memory": "64Gi"}
    fake_nodes(1)
    assert api.apply(tiny).returncode == 0
    until("Invalid", lambda: _columns(api)[:3] == ["tiny-moe", "Invalid", "Infeasible"])
    fake_nodes(2)
    until("all pods run", lambda: running(api) == WHOLE, 60)


def _columns(api: Api) -> list[str]:
    return api.ok("get", "grpojobs", "--no-headers").split()


def test_what_the_scheduler_says_is_in_the_status(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    claim = {"name": "data", "persistentVolumeClaim": {"claimName": "absent"}}
    tiny["spec"]["trainer"]["podTemplate"] = {"spec": {"volumes": [claim]}}
    assert api.apply(tiny).returncode == 0
    until("a reason", lambda: _columns(api)[:3] == ["tiny-moe", "Starting", "Unschedulable"], 30)
    events = until("an event", lambda: "Unschedulable" in (text := api.ok("get", "events")) and text, 30)
    assert "no node for tiny-moe-trainer" in events and 'persistentvolumeclaim "absent" not found' in events


def test_deleting_the_job_deletes_everything(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    api.ok("delete", "grpojob", "tiny-moe")
    kinds = "pods,services,configmaps,rayclusters,rolloutpools"
    until("nothing is left", lambda: not api.ok("get", kinds, "-l", "rl.grpo.dev/job", "-o", "name"), 60)


def test_suspend_of_a_queued_job_is_left_to_kueue(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    """Suspend and resume the RayCluster by hand as Kueue does; then a user suspends the job."""
    fake_nodes(2)
    tiny["spec"]["scheduling"] = {"queueName": "team-a"}
    assert api.apply(tiny).returncode == 0
    until("the RayCluster", lambda: api.exists("raycluster", "tiny-moe"), 30)
    assert api.get("raycluster", "tiny-moe")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    _hold(api, True)
    until("queued", lambda: api.get("grpojob", "tiny-moe")["status"]["phase"] == "Pending", 30)
    until("no pod", lambda: not api.get("pods")["items"], 30)
    api.ok("scale", "rpool", "tiny-moe-rollout", "--replicas=1")  # a write must not start the pods
    time.sleep(3)
    assert api.get("raycluster", "tiny-moe")["spec"]["suspend"] is True and not api.get("pods")["items"]
    _hold(api, False)
    until("all pods run", lambda: running(api) == WHOLE - Counter(rollout=1), 60)
    tiny["spec"]["suspend"] = True
    lose_controller(api, "tiny-moe")
    assert api.apply(tiny).returncode == 0
    until("the quota is free", lambda: api.run("get", "raycluster", "tiny-moe").returncode != 0, 60)
    until("Suspended", lambda: api.get("grpojob", "tiny-moe")["status"]["phase"] == "Suspended", 30)


def _hold(api: Api, hold: bool) -> None:
    patch = json.dumps({"spec": {"suspend": hold}})
    api.ok("patch", "raycluster", "tiny-moe", "--type=merge", "--field-manager=kueue", "-p", patch)
