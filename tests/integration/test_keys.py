"""The key shared by the pods of a namespace: created once and mounted where it is needed."""

import base64
from collections.abc import Iterator
from typing import Any

import pytest

from support.api_server import POOL, Api, Operator, until

SECRET = "grpo-agents"


def _key(api: Api, namespace: str = "default") -> str:
    encoded = api.get("secret", SECRET, "-n", namespace)["data"]["key"]
    return base64.b64decode(encoded).decode()


def _sees(pod: dict[str, Any]) -> set[str]:
    """Return the containers of a pod that can read the key."""
    containers = pod["spec"]["containers"] + pod["spec"].get("initContainers", [])
    return {c["name"] for c in containers for mount in c["volumeMounts"] if mount["name"] == "key"}


def test_agents_and_controller_share_a_key_across_operator_restarts(
    api: Api, tiny: dict[str, Any], fake_nodes: Any, operator: Operator
) -> None:
    fake_nodes(3)
    assert api.apply(tiny).returncode == 0
    until("its pods", lambda: len(api.get("pods")["items"]) == 6, 60)
    seen = {pod["metadata"]["labels"][POOL]: _sees(pod) for pod in api.get("pods")["items"]}
    assert seen == {"head": set(), "controller": {"controller"}, "trainer": {"agent"}, "rollout": {"agent"}}
    key = _key(api)
    assert len(key) == 64
    operator.restart()
    second = tiny | {"metadata": {"name": "second"}}
    assert api.apply(second).returncode == 0
    until("the second's pods", lambda: api.get("pods", "-l", "rl.grpo.dev/job=second")["items"], 60)
    assert _key(api) == key


@pytest.fixture
def namespace(api: Api) -> Iterator[str]:
    api.ok("create", "namespace", "apart")
    yield "apart"
    api.ok("delete", "namespace", "apart", "--wait=false")


def test_a_secret_without_a_key_stalls_the_job_until_deleted(
    api: Api, tiny: dict[str, Any], fake_nodes: Any, namespace: str
) -> None:
    fake_nodes(2)
    api.ok("create", "secret", "generic", SECRET, "--from-literal=other=x", "-n", namespace)
    assert api.apply(tiny | {"metadata": {"name": "kept", "namespace": namespace}}).returncode == 0

    def stalled() -> str:
        status = api.get("grpo", "kept", "-n", namespace).get("status") or {}
        return next((c["message"] for c in status.get("conditions", []) if c["type"] == "Stalled"), "")

    message = until("the job says why", stalled, 60)
    assert "Secret apart/grpo-agents has no 'key': delete it" in message
    assert api.get("rayclusters,pods", "-n", namespace)["items"] == []
    api.ok("delete", "secret", SECRET, "-n", namespace)
    until("its pods", lambda: len(api.get("pods", "-n", namespace)["items"]) == 6, 90)
    assert len(_key(api, namespace)) == 64
    api.ok("delete", "grpo", "kept", "-n", namespace, "--cascade=foreground", "--timeout=60s")
