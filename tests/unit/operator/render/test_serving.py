"""Pods, Service, key and NetworkPolicy of a RolloutPool that serves its model."""

import asyncio
import shlex
from typing import Any, cast

import pytest

from grpo_operator.api.keys import api_key, owner_key
from grpo_operator.api.names import AGENT_PORT, ENGINE_PORT, MASTER_SECRET
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.apply.pod_keys import PodKeys
from grpo_operator.kuberay_client.kube import Kube
from grpo_operator.plan.serving import serving_of
from grpo_operator.render.policies import ANY_JOB, network_policy
from grpo_operator.render.ray_cluster import pool_cluster
from grpo_operator.render.serving import serve_service
from grpo_operator.settings import OperatorSettings
from support.secrets_api import SecretsApi

SETTINGS = OperatorSettings("trainer:1", "rollout:1")
FULL = {"tensorParallel": 8, "gpusPerNode": 8}


def _pool(serve: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    model = {"path": "/models/run/export/checkpoint-40", "volume": {"mountPath": "/models", "pvc": "runs"}}
    given = {"model": model, "serve": serve or {}, "engine": FULL, "replicas": 2} | spec
    return {
        "apiVersion": "rl.grpo.dev/v1alpha1",
        "kind": "RolloutPool",
        "metadata": {"name": "policy", "namespace": "rl", "uid": "99999999-bbbb", "generation": 1},
        "spec": given,
    }


def _spec(pool: dict[str, Any]) -> RolloutPoolSpec:
    return RolloutPoolSpec.model_validate(pool["spec"])


def _pod(pool: dict[str, Any]) -> dict[str, Any]:
    (group,) = pool_cluster(pool, _spec(pool), SETTINGS).wire()["spec"]["workerGroupSpecs"]
    return dict(group["template"])


def _containers(pool: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    engine, agent = _pod(pool)["spec"]["containers"]
    return engine, agent


def _command(container: dict[str, Any]) -> list[str]:
    return shlex.split(container["args"][0])


def _env(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container["env"]}


def _value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_the_server_loads_the_weights_of_its_model_and_serves_users() -> None:
    engine, _ = _containers(_pool())
    command = _command(engine)
    assert _value(command, "--model-path") == "/models/run/export/checkpoint-40"
    assert (_value(command, "--served-model-name"), _value(command, "--weight-version")) == ("policy", "0")
    assert command[command.index("/tmp/model") + 1 :][:2] == ["--api-key", "/etc/grpo-api/api-key"]
    assert _value(command, "--admin-api-key") == "$(cat /tmp/model/admin-key)", "users cannot change weights"
    # Dummy weights, no tokenizer, and the same seed for every request are for jobs.
    for option in (
        "--load-format", "--skip-tokenizer-init", "--random-seed", "--sampling-backend",
        "--incremental-streaming-output", "--enable-deterministic-inference",
    ):  # fmt: skip
        assert option not in command
    assert _env(engine)["GRPO_SAMPLING"] == "sglang"
    assert {mount["mountPath"] for mount in engine["volumeMounts"]} >= {"/models", "/etc/grpo-api"}


def test_engines_on_cpus_are_deterministic_only_if_asked() -> None:
    flag = "--enable-deterministic-inference"
    assert flag not in _command(_containers(_pool(engine={"device": "cpu"}))[0])
    assert flag in _command(_containers(_pool(engine={"device": "cpu", "deterministic": True}))[0])


def test_the_agent_waits_for_no_job_and_uses_the_key_that_the_server_started_with() -> None:
    engine, agent = _containers(_pool())
    command = agent["args"][0]
    assert " --own-weights --api-key /tmp/model/api-key" in command
    assert not any(option in command for option in ("--writer", "--peers", "--store"))
    assert _env(engine)["GRPO_API_KEY_FILE"] == "/tmp/model/api-key"
    assert "api" not in {mount["name"] for mount in agent["volumeMounts"]}


def test_no_setting_for_jobs_costs_the_agent_memory() -> None:
    delta = _pool(weightSync={"mode": "delta", "transport": "staged"})
    assert _containers(delta)[1]["args"] == _containers(_pool())[1]["args"]


def test_probes_need_no_key() -> None:
    engine, agent = _containers(_pool())
    asked = {probe: engine[probe]["httpGet"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert asked == {
        "startupProbe": {"path": "/health", "port": ENGINE_PORT},
        "readinessProbe": {"path": "/health", "port": ENGINE_PORT},
        "livenessProbe": {"path": "/enginez", "port": AGENT_PORT},
    }
    assert _env(engine)["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false"
    assert agent["readinessProbe"]["httpGet"]["path"] == "/readyz"


@pytest.mark.parametrize(("given", "secret"), [({}, "policy-99999999-api"), ({"secretName": "mine"}, "mine")])
def test_the_key_is_that_of_the_operator_or_of_the_user(given: dict[str, Any], secret: str) -> None:
    volumes = {volume["name"]: volume for volume in _pod(_pool(given))["spec"]["volumes"]}
    assert volumes["api"]["secret"] == {
        "secretName": secret, "items": [{"key": "api-key", "path": "api-key"}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "port", "selector"),
    [
        ({}, {"name": "http", "port": 80}, {}),
        ({"scheduling": {"tls": {}}}, {"name": "https", "port": 443}, {}),
        (
            {"engine": {"tensorParallel": 16, "gpusPerNode": 8, "nodesPerEngine": 2}},
            {"name": "http", "port": 80},
            {"ray.io/replica-host-index": "0"},
        ),
    ],
    ids=["plain", "tls", "two hosts"],
)
def test_one_service_is_in_front_of_all_engines_that_are_ready(
    spec: dict[str, Any], port: dict[str, Any], selector: dict[str, str]
) -> None:
    pool = _pool(**spec)
    serving = serving_of(pool, _spec(pool))
    assert serving is not None
    service = serve_service(pool, _spec(pool), serving)
    assert service["metadata"]["name"] == "policy-serve"
    assert service["metadata"]["ownerReferences"][0]["uid"] == "99999999-bbbb"
    labels = {"rl.grpo.dev/rolloutpool": "policy", "rl.grpo.dev/pool": "rollout"}
    assert service["spec"] == {
        "type": "ClusterIP",
        "selector": labels | selector,
        "ports": [port | {"targetPort": ENGINE_PORT, "protocol": "TCP"}],
    }
    assert labels.items() <= _pod(pool)["metadata"]["labels"].items()


def test_pods_of_the_namespace_may_call_the_engines_and_jobs_nothing_more() -> None:
    ingress = network_policy(_pool(), SETTINGS, serves=True)["spec"]["ingress"]
    own = {"podSelector": {"matchLabels": {"rl.grpo.dev/rolloutpool": "policy"}}}
    assert ingress[:2] == [
        {"from": [own]},
        {"from": [{"podSelector": {}}], "ports": [{"port": ENGINE_PORT, "protocol": "TCP"}]},
    ]
    others = network_policy(_pool(), SETTINGS, allowed=ANY_JOB)["spec"]["ingress"]
    assert ENGINE_PORT not in [port["port"] for rule in others for port in rule.get("ports", [])]


def test_the_operator_derives_the_key_of_users_from_the_pools_uid() -> None:
    kube = SecretsApi()
    keys = PodKeys(cast(Kube, kube), 300.0, lambda: 1000.0)
    asyncio.run(keys.provide_api_key(_pool()))
    master = kube.content(MASTER_SECRET)["key"]
    assert kube.content("policy-99999999-api") == {"api-key": api_key(master, _pool())}
    other = _pool() | {"metadata": _pool()["metadata"] | {"uid": "11111111-bbbb"}}
    keys_of = {api_key(master, _pool()), api_key(master, other), owner_key(master, _pool())}
    assert len(keys_of) == 3, "it opens neither a later pool nor the agents"
    (reference,) = kube.secrets["policy-99999999-api"]["metadata"]["ownerReferences"]
    assert reference["uid"] == "99999999-bbbb", "it ends with the pool"
