"""A running job and a running pool, which another operator takes over."""

import json
from typing import Any

from support.api_server import WHOLE, Api, until

OWNERS = {"job": "rl.grpo.dev/job=tiny-moe", "pool": "rl.grpo.dev/rolloutpool=standing"}
_CHILDREN = "rayclusters,rolloutpools,configmaps,services,poddisruptionbudgets,networkpolicies"


def pods_of(api: Api, selector: str) -> dict[str, dict[str, Any]]:
    """Return the running pods by UID."""
    items = api.get("pods", "-l", selector)["items"]
    return {p["metadata"]["uid"]: p for p in items if p["status"].get("phase") == "Running"}


def images_of(pods: dict[str, dict[str, Any]]) -> set[str]:
    return {container["image"] for pod in pods.values() for container in pod["spec"]["containers"]}


def standing_pool(tiny: dict[str, Any]) -> dict[str, Any]:
    """Return a pool without a job, with the engines of the tiny manifest."""
    spec = tiny["spec"]["rollout"]["template"] | {"model": tiny["spec"]["model"]}
    metadata = {"name": "standing", "namespace": "default"}
    return {"apiVersion": tiny["apiVersion"], "kind": "RolloutPool", "metadata": metadata, "spec": spec}


def written(api: Api) -> dict[str, str]:
    """Return the version of each object that the operator has made for the job and the pool."""
    items = [item for label in OWNERS.values() for item in api.get(_CHILDREN, "-l", label)["items"]]
    return {i["kind"] + i["metadata"]["name"]: _version(i) for i in items}


def _version(item: dict[str, Any]) -> str:
    # KubeRay writes the status of RayClusters: what counts is the generation and what the operator annotates.
    meta = item["metadata"]
    return json.dumps([meta.get("generation"), meta.get("annotations"), item.get("data")])


def start_job_and_pool(api: Api, tiny: dict[str, Any]) -> dict[str, set[str]]:
    """Create the job and the pool, and return the UIDs of their pods when all run."""
    assert api.apply(tiny).returncode == api.apply(standing_pool(tiny)).returncode == 0
    until("the job", lambda: len(pods_of(api, OWNERS["job"])) == WHOLE.total(), 60)
    until("the pool", lambda: len(pods_of(api, OWNERS["pool"])) == 3, 60)
    until("images", lambda: layout_of(api).get("images"), 30)
    until("the pool's", lambda: api.get("rpool", "standing").get("status", {}).get("images"), 30)
    return {kind: set(pods_of(api, label)) for kind, label in OWNERS.items()}


def layout_of(api: Api, name: str = "tiny-moe") -> dict[str, Any]:
    return dict(api.get("grpojob", name).get("status", {}).get("layout") or {})


def replaced(api: Api, label: str, before: set[str]) -> dict[str, dict[str, Any]]:
    """Delete a pod and return the one that replaces it."""
    api.ok("delete", "pod", next(iter(pods_of(api, label).values()))["metadata"]["name"])

    def new() -> dict[str, dict[str, Any]]:
        return {uid: pod for uid, pod in pods_of(api, label).items() if uid not in before}

    return dict(until("another pod", new, 60))
