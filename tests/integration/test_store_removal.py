"""Deletion of jobs whose folder is removed, with a real API server and garbage collector.

The pod that would remove it runs on KWOK's nodes, where it does nothing: tests play its end.
"""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_operator.api.names import STORE_FINALIZER
from support.api_server import WHOLE, Api, running, until
from support.removal_pods import crash, end, policy, remover, removers

QUOTA = ("resourcequota", "no-pods")


@pytest.fixture
def job(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> Iterator[dict[str, Any]]:
    """The manifest of a job that goes with its folder; whatever happens, it goes after the test."""
    fake_nodes(2)
    tiny["spec"]["checkpoint"]["deletionPolicy"] = "Delete"
    yield tiny
    if api.exists("grpojob", "tiny-moe"):
        policy(api, "tiny-moe", "Retain")


def _suspended(job: dict[str, Any]) -> dict[str, Any]:
    """Return a job without pods: what is tested needs none."""
    job["spec"]["suspend"] = True
    return job


def _delete(api: Api, *arguments: str) -> None:
    api.ok("delete", "grpojob", "tiny-moe", "--wait=false", *arguments)


def _gone(api: Api) -> None:
    until("the job is gone", lambda: not api.exists("grpojob", "tiny-moe"), 60)
    until("its pod too", lambda: not removers(api), 90)


def _held(api: Api, name: str = "tiny-moe", namespace: str = "default") -> bool:
    found = api.get("grpojob", name, "-n", namespace)["metadata"].get("finalizers", [])
    return STORE_FINALIZER in found


def _condition(api: Api) -> dict[str, Any]:
    conditions = api.get("grpojob", "tiny-moe").get("status", {}).get("conditions", [])
    return next((c for c in conditions if c["type"] == "StoreRemoved"), {})


def _events(api: Api, reason: str) -> list[dict[str, Any]]:
    return list(api.get("events", f"--field-selector=reason={reason}")["items"])


@pytest.mark.parametrize("cascade", ["background", "foreground", "orphan"])
def test_the_folder_is_removed_after_the_pods_and_before_the_job(
    api: Api, job: dict[str, Any], cascade: str
) -> None:
    assert api.apply(job).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    assert _held(api)
    _delete(api, f"--cascade={cascade}")
    pod = remover(api)
    assert not api.exists("raycluster", "tiny-moe")
    own = api.get("pods", "-l", "rl.grpo.dev/job=tiny-moe")["items"]
    assert [p["metadata"]["name"] for p in own] == [pod["metadata"]["name"]], "nothing writes any more"
    assert "/store/default-tiny-moe-" in pod["spec"]["containers"][0]["args"][0]
    time.sleep(5)
    assert remover(api)["metadata"]["uid"] == pod["metadata"]["uid"], "nobody deletes it"
    assert _condition(api)["reason"] == "RemovingStore" and _held(api)
    end(api, pod)
    _gone(api)
    folder = f"default-tiny-moe-{pod['metadata']['ownerReferences'][0]['uid'][:8]}"
    assert any(folder in event["message"] for event in _events(api, "StoreRemoved"))


def test_a_failure_is_reported_and_given_up_by_the_policy(api: Api, job: dict[str, Any]) -> None:
    assert api.apply(_suspended(job)).returncode == 0
    until("held", lambda: _held(api))
    _delete(api)
    crash(api, remover(api), "checkpoint.store.path=/x: y is not removed: PermissionError: [Errno 13]")
    until("the reason", lambda: _condition(api)["reason"] == "StoreRemovalFailed", 30)
    message = _condition(api)["message"]
    assert (
        "PermissionError: [Errno 13]: correct that, or set spec.checkpoint.deletionPolicy to Ret" in message
    )
    assert any("PermissionError" in e["message"] for e in _events(api, "StoreRemovalFailed"))
    assert "StoreRemovalFailed" in api.ok("get", "grpojobs", "--no-headers")
    policy(api, "tiny-moe", "Retain")
    _gone(api)
    assert any("deletionPolicy=Retain" in event["message"] for event in _events(api, "StoreRetained"))


@pytest.mark.slow
def test_a_pod_that_is_evicted_is_replaced(api: Api, job: dict[str, Any]) -> None:
    assert api.apply(_suspended(job)).returncode == 0
    until("held", lambda: _held(api))
    _delete(api)
    first = remover(api)
    end(api, first, "Failed")
    second = remover(api, other_than=first["metadata"]["uid"], timeout=90)
    assert second["metadata"]["name"] == first["metadata"]["name"]
    end(api, second)
    _gone(api)


def test_a_pod_that_is_refused_is_tried_again(api: Api, job: dict[str, Any]) -> None:
    assert api.apply(_suspended(job)).returncode == 0
    until("held", lambda: _held(api))
    api.ok("create", *QUOTA, "--hard=pods=0")
    try:
        until("the quota counts", lambda: api.get(*QUOTA).get("status", {}).get("used"), 30)
        _delete(api)
        until("the reason", lambda: "exceeded quota" in _condition(api).get("message", ""), 30)
        assert _condition(api)["message"].startswith("the API server refused the pod: pods ")
    finally:
        api.ok("delete", *QUOTA)
    end(api, remover(api))
    _gone(api)


def test_a_namespace_that_is_deleted_does_not_hang(api: Api, job: dict[str, Any]) -> None:
    api.ok("create", "namespace", "ends")
    job["metadata"]["namespace"] = "ends"
    assert api.apply(_suspended(job)).returncode == 0
    until("held", lambda: _held(api, namespace="ends"))
    api.ok("delete", "namespace", "ends", "--wait=false")
    until("the namespace is gone", lambda: not api.exists("namespace", "ends"), 90)


def test_the_policy_of_a_job_can_be_changed(api: Api, job: dict[str, Any]) -> None:
    assert api.apply(_suspended(job)).returncode == 0
    until("held", lambda: _held(api))
    policy(api, "tiny-moe", "Retain")
    until("not held", lambda: not _held(api))
    policy(api, "tiny-moe", "Delete")
    until("held again", lambda: _held(api))
    policy(api, "tiny-moe", "Retain")
    until("not held", lambda: not _held(api))
    _delete(api)
    _gone(api)
