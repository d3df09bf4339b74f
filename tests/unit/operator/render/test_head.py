"""Ray's head: its size, its overlay, and the Redis that keeps its state."""

import os
import subprocess
from typing import Any

import pytest

from grpo_operator.plan.capacity.pod_requests import job_requests
from grpo_operator.render.ray_cluster import job_cluster
from grpo_operator.settings import OperatorSettings
from support.objects import job, pool_of, spec_of

REDIS: dict[str, Any] = {
    "redisAddress": "redis.ray.svc:6379",
    "redisPassword": {"secret": "redis", "key": "password"},
}


def _spec(**head: Any) -> dict[str, Any]:
    manifest = job(head=head)
    spec = spec_of(manifest)
    made = job_cluster(manifest, spec, pool_of(spec), OperatorSettings("t:1", "r:1"), False).wire()
    return dict(made["spec"])


def test_a_head_keeps_its_state_where_the_field_says() -> None:
    assert "gcsFaultToleranceOptions" not in _spec()
    password = {"secretKeyRef": {"name": "redis", "key": "password"}}
    assert _spec(gcsFaultTolerance=REDIS)["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis.ray.svc:6379",
        "redisPassword": {"valueFrom": password},
    }


def test_the_container_that_removes_a_heads_keys_needs_no_secret_of_the_cluster() -> None:
    def token(**head: Any) -> list[dict[str, Any]]:
        (container,) = _spec(**head)["headGroupSpec"]["template"]["spec"]["containers"]
        return [one for one in container["env"] if one["name"] == "RAY_AUTH_TOKEN"]

    assert token() == [], "KubeRay adds it"
    (variable,) = token(gcsFaultTolerance=REDIS)
    reference = {"name": job()["metadata"]["name"], "key": "auth_token", "optional": True}
    assert variable["valueFrom"] == {"secretKeyRef": reference}


@pytest.mark.parametrize("address", ["redis", "redis:port", "http://redis:6379", "redis:6379/0", ""])
def test_an_address_without_host_and_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="redisAddress"):
        _spec(gcsFaultTolerance=REDIS | {"redisAddress": address})


def test_a_head_has_the_size_of_the_job_unless_it_is_given() -> None:
    def container(**head: Any) -> dict[str, Any]:
        (found,) = _spec(**head)["headGroupSpec"]["template"]["spec"]["containers"]
        return dict(found)

    assert container()["resources"]["requests"]["cpu"] == "300m"
    given = {"resources": {"cpu": "2", "memory": "9Gi"}}
    assert container(**given)["resources"]["requests"] == {"cpu": "2", "memory": "9Gi"}
    spec = spec_of(job(head=given))
    (request,) = [one for one in job_requests(spec, pool_of(spec)) if one.pool == "head"]
    assert (request.cpu, request.memory) == (2.0, 9 * 2**30)


def test_a_head_starts_ray_without_waiting_for_agents() -> None:
    template = _spec()["headGroupSpec"]["template"]
    assert template["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    (command,) = template["spec"]["containers"][0]["args"]
    environment = os.environ | {"KUBERAY_GEN_RAY_START_CMD": "echo ulimit; echo ray start --head"}
    shell = ["/bin/bash", "-c", command]
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "ulimit\npython3 -m grpo_worker.roles.ray_node --head\n"


def test_a_heads_pod_takes_an_overlay() -> None:
    overlay = {"spec": {"containers": [{"name": "ray-head", "env": [{"name": "X", "value": "1"}]}]}}
    pod = _spec(podTemplate=overlay)["headGroupSpec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {"name": "X", "value": "1"} in container["env"] and container["resources"]["requests"]
