"""Pods of a job with ``scheduling.tls``: what they mount, how they are probed, and where their URLs lead."""

from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.api.v1alpha1.tls import TlsSpec
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.planner.pool_checks import check_reference
from grpo_operator.plan.planner.resolve import RefusedError
from grpo_operator.render.certificates import Authority
from grpo_operator.render.ray_cluster import job_cluster, pool_cluster
from grpo_operator.render.tls import tls_config, tls_secret
from grpo_operator.settings import OperatorSettings
from support.objects import job, pod, pool_of, spec_of

SETTINGS = OperatorSettings("trainer:1", "rollout:1")
MASTER = "m" * 64
CA = Authority(MASTER, "default").trusted(0)
GIVEN = {"secretName": "from-cert-manager", "caBundle": CA}
NAME = "tiny-moe.default.grpo"


def templates(tls: dict[str, Any] | None, **spec: Any) -> dict[str, dict[str, Any]]:
    """Return the pod templates of the tiny job by pool."""
    scheduling = {} if tls is None else {"scheduling": {"tls": tls}}
    manifest = job(**scheduling, **spec)
    parsed = spec_of(manifest)
    own = pool_of(parsed) if parsed.rollout.template else None
    made = job_cluster(manifest, parsed, own, SETTINGS, False).wire()["spec"]
    groups = {group["groupName"]: group["template"] for group in made["workerGroupSpecs"]}
    return groups | {"head": made["headGroupSpec"]["template"]}


def containers(template: dict[str, Any]) -> dict[str, dict[str, Any]]:
    spec = template["spec"]
    return {c["name"]: c for c in (*spec.get("initContainers", []), *spec["containers"])}


def env(container: dict[str, Any]) -> dict[str, Any]:
    return {variable["name"]: variable.get("value") for variable in container["env"]}


def probes(template: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        value["httpGet"]
        for container in containers(template).values()
        for name, value in container.items()
        if name.endswith("Probe")
    ]


def test_pods_without_the_field_know_nothing_of_it() -> None:
    text = yaml.safe_dump(templates(None)).lower()
    assert "tls" not in text and "https" not in text


def test_servers_and_those_who_call_them_mount_the_certificates() -> None:
    pods = templates({})
    having = {
        pool: {name for name, c in containers(template).items() if "GRPO_TLS_DIR" in env(c)}
        for pool, template in pods.items()
    }
    assert having == {
        "controller": {"controller"}, "trainer": {"agent"}, "rollout": {"engine", "agent"}, "head": set()
    }  # fmt: skip
    for pool, template in pods.items():
        for name in having[pool]:
            container = containers(template)[name]
            assert env(container)["GRPO_TLS_NAME"] == NAME
            assert {"name": "tls", "mountPath": env(container)["GRPO_TLS_DIR"], "readOnly": True} in (
                container["volumeMounts"]
            )


def test_the_container_that_fetches_reports_over_tls_too() -> None:
    model = {"path": "/models/tiny", "volume": {"mountPath": "/models", "uri": "hf://org/model"}}
    model |= {"architecture": "tiny-moe"}
    controller = containers(templates({}, model=model)["controller"])
    assert env(controller["fetch"])["GRPO_TLS_NAME"] == NAME


def test_ranks_that_read_routed_experts_have_them_too() -> None:
    algorithm = job()["spec"]["algorithm"] | {"routingReplay": True}
    rollout = job()["spec"]["rollout"]
    rollout["template"]["engine"] |= {"returnRoutedExperts": True}
    pods = templates({}, algorithm=algorithm, rollout=rollout)
    assert env(containers(pods["trainer"])["ray-worker"])["GRPO_TLS_NAME"] == NAME
    assert env(containers(pods["rollout"])["engine"])["GRPO_ROUTED_EXPERTS_URL"] == "https://$(POD_IP):9000"


def test_every_probe_speaks_https_and_the_operator_sees_which_pods_do() -> None:
    for pool, template in templates({}).items():
        assert all(asked["scheme"] == "HTTPS" for asked in probes(template))
        assert ("rl.grpo.dev/tls" in template["metadata"]["labels"]) == (pool != "head")
    for template in templates(None).values():
        assert not any("scheme" in asked for asked in probes(template))


def test_the_engine_answers_probes_without_its_key() -> None:
    engine = containers(templates({})["rollout"])["engine"]
    for probe in ("startupProbe", "readinessProbe"):
        assert engine[probe]["httpGet"] == {"path": "/health", "port": 30000, "scheme": "HTTPS"}
    assert env(engine)["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "false", "no token for each probe"


def test_a_multi_host_engine_is_probed_over_its_agents() -> None:
    rollout = job()["spec"]["rollout"]
    rollout["template"]["engine"] |= {"nodesPerEngine": 2, "tensorParallel": 2}
    template = templates({}, rollout=rollout)["rollout"]
    assert {asked["port"] for asked in probes(template)} == {9000}
    text = yaml.safe_dump(template, width=1 << 20)
    assert "https://127.0.0.1:9000/hostz" in text and "http://" not in text
    assert "https://tiny-moe-$GROUP-$REPLICA_INDEX:9000" in text


def test_keys_come_from_secrets_and_certificates_from_a_config_map() -> None:
    (volume,) = [v for v in templates({})["trainer"]["spec"]["volumes"] if v["name"] == "tls"]
    secret, config = volume["projected"]["sources"]
    assert secret["secret"]["name"] == "tiny-moe-12345678-tls"
    assert {item["key"] for item in secret["secret"]["items"]} == {"tls.key", "generate"}
    assert config["configMap"]["name"] == "tiny-moe-tls"
    content = tls_secret(MASTER, job(), TlsSpec(), None)
    assert content.keys() == {"tls.key", "generate"}
    public = tls_config(MASTER, job(), TlsSpec(), 0)
    assert public["data"].keys() == {"tls.crt", "ca.crt"} and "PRIVATE" not in str(public)
    assert public["metadata"]["ownerReferences"][0]["uid"] == job()["metadata"]["uid"]


def test_with_a_secret_of_the_user_the_operator_makes_no_certificate() -> None:
    (volume,) = [v for v in templates(GIVEN)["trainer"]["spec"]["volumes"] if v["name"] == "tls"]
    own, config, given = volume["projected"]["sources"]
    assert [item["key"] for item in own["secret"]["items"]] == ["generate"]
    assert [item["key"] for item in config["configMap"]["items"]] == ["ca.crt"]
    assert given["secret"] == {
        "name": "from-cert-manager",
        "items": [{"key": "tls.crt", "path": "tls.crt"}, {"key": "tls.key", "path": "tls.key"}],
    }
    spec = TlsSpec.model_validate(GIVEN)
    assert tls_secret(MASTER, job(), spec, None).keys() == {"generate"}
    assert tls_config(MASTER, job(), spec, 0)["data"] == {"ca.crt": CA}


def test_a_bundle_without_a_certificate_is_refused() -> None:
    text = "-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----"
    with pytest.raises(ValidationError, match="give one or more certificates of CAs in PEM"):
        TlsSpec.model_validate(GIVEN | {"caBundle": text})


def _shared(tls: dict[str, Any] | None) -> tuple[dict[str, Any], RolloutPoolSpec]:
    own = job()["spec"]
    spec = own["rollout"]["template"] | {"model": own["model"]}
    spec |= {} if tls is None else {"scheduling": {"tls": tls}}
    meta = {"name": "shared", "namespace": "default", "uid": "87654321-a"}
    pool = {"apiVersion": "rl.grpo.dev/v1alpha1", "kind": "RolloutPool", "metadata": meta, "spec": spec}
    return pool, RolloutPoolSpec.model_validate(spec)


def test_a_job_and_its_shared_pool_know_each_others_names() -> None:
    of_job = env(
        containers(templates({}, rollout={"poolRef": {"name": "shared"}})["controller"])["controller"]
    )
    pool, spec = _shared({})
    template = pool_cluster(pool, spec, SETTINGS).wire()["spec"]["workerGroupSpecs"][0]["template"]
    of_pool = env(containers(template)["agent"])
    assert of_job["GRPO_TLS_PAIR_NAME"] == of_pool["GRPO_TLS_NAME"] == "shared.default.grpo"
    assert "GRPO_TLS_PAIR_NAME" not in of_pool


@pytest.mark.parametrize(
    ("ours", "its", "problem"),
    [
        ({}, None, "RolloutPool shared has none"),
        (None, {}, "this job has none"),
        ({}, GIVEN, "caBundle: that of RolloutPool shared differs"),
        (GIVEN, {}, "caBundle: that of RolloutPool shared differs"),
        ({}, {}, ""),
        (None, None, ""),
        (GIVEN, GIVEN, ""),
    ],
)
def test_a_job_and_its_shared_pool_need_the_same(
    ours: dict[str, Any] | None, its: dict[str, Any] | None, problem: str
) -> None:
    scheduling = {} if ours is None else {"scheduling": {"tls": ours}}
    spec = spec_of(job(rollout={"poolRef": {"name": "shared"}}, **scheduling))
    _, pool = _shared(its)
    if not problem:
        check_reference(spec, pool)
        return
    with pytest.raises(RefusedError, match=problem) as refused:
        check_reference(spec, pool)
    assert refused.value.reason == "PoolMismatch"


def test_endpoints_in_the_status_have_scheme_and_brackets() -> None:
    plain, secure = pod("rollout", 0), pod("rollout", 1)
    secure["metadata"]["labels"]["rl.grpo.dev/tls"] = "enabled"
    secure["status"]["podIP"] = "fd00::9"
    seen = Observed(None, (plain, secure), None, {})
    assert [e.endpoint for e in seen.engines()] == ["http://10.0.0.9:30000", "https://[fd00::9]:30000"]
