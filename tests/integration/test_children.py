"""Changes of a job's children by others, and specs at the limits of an API server."""

import copy
import json
import time
from functools import partial
from typing import Any

import pytest
import yaml

from grpo_devcluster.fakenodes import fake_node
from support.api_server import WHOLE, Api, running, stalled, until

CHILDREN = {
    "configmap": "tiny-moe-job",
    "service": "tiny-moe-rollout",
    "poddisruptionbudget": "tiny-moe-trainer",
    "networkpolicy": "tiny-moe",
    "rolloutpool": "tiny-moe-rollout",
}


def test_deleted_children_are_recreated(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    cluster = api.get("raycluster", "tiny-moe")["metadata"]["uid"]
    for kind, name in CHILDREN.items():
        # Budgets come when all pods are there.
        until(f"{kind} {name}", partial(api.exists, kind, name))
        before = api.get(kind, name)["metadata"]["uid"]
        api.ok("delete", kind, name)

        def again(kind: str = kind, name: str = name, before: str = before) -> bool:
            found = api.run("get", kind, name, "-o", "jsonpath={.metadata.uid}")
            return found.returncode == 0 and found.stdout != before

        until(f"{kind} {name} is back", again, 30)
    assert api.get("raycluster", "tiny-moe")["metadata"]["uid"] == cluster
    api.ok("delete", "raycluster", "tiny-moe")
    until("all pods run again", lambda: running(api) == WHOLE, 90)
    assert api.get("raycluster", "tiny-moe")["metadata"]["uid"] != cluster


def test_our_fields_are_restored_and_fields_of_others_stay(
    api: Api, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    api.ok("label", "raycluster", "tiny-moe", "team=rl")
    path = "/spec/workerGroupSpecs/2/replicas"
    patch = json.dumps([{"op": "replace", "path": path, "value": 5}])
    api.ok("patch", "raycluster", "tiny-moe", "--type=json", "--field-manager=another", "-p", patch)
    changed = "rl.grpo.dev/job=tiny-moe"
    api.ok("patch", "configmap", "tiny-moe-job", "--type=merge", "-p", '{"data": {"job.json": "{}"}}')

    def ours() -> bool:
        groups = api.get("raycluster", "tiny-moe")["spec"]["workerGroupSpecs"]
        return (
            groups[2]["replicas"] == 2 and len(api.get("configmap", "tiny-moe-job")["data"]["job.json"]) > 99
        )

    until("our values", ours, 30)
    assert api.get("raycluster", "tiny-moe")["metadata"]["labels"]["team"] == "rl"
    until("the pods", lambda: running(api) == WHOLE, 60)
    time.sleep(2)
    before = [
        i["metadata"]["resourceVersion"] for i in api.get("rayclusters,configmaps", "-l", changed)["items"]
    ]
    time.sleep(4)
    after = [
        i["metadata"]["resourceVersion"] for i in api.get("rayclusters,configmaps", "-l", changed)["items"]
    ]
    assert after == before, "the operator and another field manager undo each other"


def test_a_name_of_63_characters_is_refused_with_the_bound(api: Api, tiny: dict[str, Any]) -> None:
    tiny["metadata"]["name"] = "n" * 63
    done = api.apply(tiny)
    assert done.returncode != 0 and "at most 40 characters" in done.stderr


def test_the_longest_name_works(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    tiny["metadata"]["name"] = "n" * 40
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    until("its pool", lambda: api.exists("rpool", "n" * 40 + "-rollout"), 30)


@pytest.mark.slow
def test_ten_thousand_variables_reach_the_pods(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    env = [{"name": f"VARIABLE_{n}", "value": "ünï ☃ 你好"} for n in range(10_000)]
    overlay = {"spec": {"containers": [{"name": "controller", "env": env}]}}
    tiny["spec"].setdefault("controller", {})["podTemplate"] = overlay
    refused = api.apply(tiny)
    assert refused.returncode != 0 and "annotations: Too long" in refused.stderr  # kubectl's own limit
    api.ok("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(tiny, allow_unicode=True))
    until("all pods run", lambda: running(api) == WHOLE, 90)
    (pod,) = api.get("pods", "-l", "rl.grpo.dev/pool=controller")["items"]
    made = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
    assert made["VARIABLE_9999"] == "ünï ☃ 你好" and "POD_NAME" in made


@pytest.mark.parametrize(
    ("overlay", "text"),
    [
        ({"hostNetwork": "yes, please"}, "hostNetwork"),
        ({"containers": [{"name": "engine", "env": [{"name": "X", "value": "x" * 2_000_000}]}]}, "too large"),
    ],
    ids=["wrong type", "too large"],
)
def test_the_job_reports_what_the_api_server_refuses(
    api: Api, tiny: dict[str, Any], fake_nodes: Any, overlay: dict[str, Any], text: str
) -> None:
    fake_nodes(2)
    tiny["spec"]["rollout"]["template"]["podTemplate"] = {"spec": overlay}
    done = api.run("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(tiny))
    if done.returncode:
        assert text in done.stderr  # etcd takes no object of more than 1.5 MiB
        return
    refusal = until("Stalled", lambda: stalled(api, "tiny-moe"), 30)
    assert refusal["reason"] == "ApplyRefused" and text in refusal["message"]
    assert api.get("pods")["items"] == []


@pytest.mark.slow
def test_an_older_crd_is_reported_with_its_missing_fields(
    api: Api, tiny: dict[str, Any], fake_nodes: Any, operator: Any
) -> None:
    fake_nodes(2)
    crd = api.get("crd", "grpojobs.rl.grpo.dev")
    older = copy.deepcopy(crd)
    spec = older["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    del spec["scheduling"]["properties"]["unhealthyNodes"]
    spec["scheduling"]["default"].pop("unhealthyNodes", None)
    try:
        api.ok("replace", "-f", "-", stdin=yaml.safe_dump(older))
        operator.restart()
        assert api.apply(tiny).returncode == 0

        def message() -> str:
            conditions = api.get("grpojob", "tiny-moe").get("status", {}).get("conditions", [])
            return next((c["message"] for c in conditions if c["reason"] == "CrdTooOld"), "")

        assert "spec.scheduling.unhealthyNodes" in until("the missing fields", message, 60)
        assert api.get("pods")["items"] == []
    finally:
        newest = api.get("crd", "grpojobs.rl.grpo.dev")["metadata"]["resourceVersion"]
        crd["metadata"]["resourceVersion"] = newest
        api.ok("replace", "-f", "-", stdin=yaml.safe_dump(crd))
    until("all pods run", lambda: running(api) == WHOLE, 90)


def test_a_template_that_is_too_large_when_it_is_repeated_for_each_leaf(api: Api) -> None:
    leaf, room = "leaf", {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "4"}
    nodes = [fake_node(f"leaf-{i}", {leaf: f"l{i}"}, room) for i in range(4)]
    env = [{"name": "LARGE", "value": "x" * 450_000}]
    pool = {
        "apiVersion": "rl.grpo.dev/v1alpha1",
        "kind": "RolloutPool",
        "metadata": {"name": "large"},
        "spec": {
            "replicas": 4,
            "model": {"path": "/models/Qwen3-8B", "architecture": "qwen3-8b"},
            "engine": {"tensorParallel": 4, "gpusPerNode": 4, "contextLength": 4096},
            "scheduling": {"topologyKey": leaf},
            "podTemplate": {"spec": {"containers": [{"name": "engine", "env": env}]}},
        },
    }
    api.ok("apply", "-f", "-", stdin=yaml.safe_dump_all(nodes))
    try:
        api.ok("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(pool))
        refusal = until("Stalled", lambda: stalled(api, "large", "rolloutpool"), 30)
        assert refusal["reason"] == "ApplyRefused" and "repeated for each network leaf" in refusal["message"]
    finally:
        api.ok("delete", "rolloutpool", "large")
        api.ok("delete", "nodes", "--all")
