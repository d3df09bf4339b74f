"""The Helm chart as rendered: rights, security, optional parts, values."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

from grpo_devcluster.dashboards.files import files
from grpo_devcluster.gobuild import binary, build_all
from grpo_devcluster.install import CHART
from grpo_devcluster.operator_process import operator_process
from grpo_operator import __version__
from grpo_operator.handlers.health import PORT as HEALTH_PORT
from support.api_proxy import ApiProxy
from support.api_server import POOL, Api, until


@pytest.fixture(scope="module", autouse=True)
def operator() -> None:
    """These tests need none, or start their own."""


NAMESPACED = {"Role", "RoleBinding"}


def _helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(binary("helm")), "template", "ops", str(CHART), "-n", "grpo-system", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def _render(*arguments: str) -> list[dict[str, Any]]:
    done = _helm(*arguments)
    assert done.returncode == 0, done.stderr
    return [d for d in yaml.safe_load_all(done.stdout) if d]


def _of(objects: list[dict[str, Any]], kind: str, name: str = "ops") -> list[dict[str, Any]]:
    return [o for o in objects if o["kind"] == kind and o["metadata"]["name"] == name]


def test_roles_are_limited_to_the_listed_namespaces() -> None:
    objects = _render("--set", "watchNamespaces={team-a,team-b}")
    (cluster,) = _of(objects, "ClusterRole")
    resources = {r for rule in cluster["rules"] for r in rule["resources"]}
    assert resources == {"nodes", "namespaces", "customresourcedefinitions"}
    assert {v for rule in cluster["rules"] for v in rule["verbs"]} == {"list", "watch"}
    roles = [o for o in objects if o["kind"] in NAMESPACED and o["metadata"]["name"] == "ops"]
    assert sorted({o["metadata"]["namespace"] for o in roles}) == ["team-a", "team-b"] and len(roles) == 4
    (deployment,) = _of(objects, "Deployment")
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--namespace=team-a" in arguments and "--all-namespaces" not in arguments


def test_the_cluster_role_has_no_wildcard_and_only_its_own_secrets() -> None:
    (cluster,) = _of(_render("--set", "allNamespaces=true"), "ClusterRole")
    for rule in cluster["rules"]:
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
    secrets = [(r["verbs"], r.get("resourceNames")) for r in cluster["rules"] if "secrets" in r["resources"]]
    epoch = ["grpo-agents-epoch"]
    assert secrets == [(["get"], ["grpo-agents", *epoch]), (["patch"], epoch), (["create"], None)]


def test_no_role_of_users_is_aggregated_into_edit_unasked() -> None:
    prefix = "rbac.authorization.k8s.io/aggregate-to-"

    def into(role: str, *arguments: str) -> set[str]:
        (found,) = _of(_render(*arguments), "ClusterRole", f"ops-{role}")
        return {label.removeprefix(prefix) for label in found["metadata"].get("labels", {})}

    assert into("viewer") == {"view", "edit", "admin"} and into("editor") == set()
    values = "userRoles.aggregateToView=false,userRoles.aggregateToEdit=true"
    assert into("viewer", "--set", values) == set() and into("editor", "--set", values) == {"edit", "admin"}


def _node_rights(*arguments: str) -> dict[str, set[str]]:
    (cluster,) = _of(_render(*arguments), "ClusterRole")
    rights: dict[str, set[str]] = {}
    for rule in cluster["rules"]:
        for resource in rule["resources"]:
            if resource.startswith("nodes"):
                rights[resource] = rights.get(resource, set()) | set(rule["verbs"])
    return rights


def test_the_operators_image_can_be_pinned_by_digest() -> None:
    def image(*arguments: str) -> str:
        (deployment,) = _of(_render(*arguments), "Deployment")
        return str(deployment["spec"]["template"]["spec"]["containers"][0]["image"])

    digest = f"sha256:{'0f' * 32}"
    assert "@" not in image()
    assert image("--set", f"image.digest={digest}").endswith(f":{__version__}@{digest}")
    (pod,) = _of(_render("--set", f"image.digest={digest}"), "Pod", "ops-test")
    assert pod["spec"]["containers"][0]["image"].endswith(f":{__version__}@{digest}")
    assert "image.digest" in _helm("--set", "image.digest=0f").stderr.replace("/", ".")


def test_images_without_a_tag_have_the_charts_version() -> None:
    def images(*arguments: str) -> dict[str, str]:
        (settings,) = _of(_render(*arguments), "ConfigMap", "ops-settings")
        return dict(json.loads(settings["data"]["settings.json"])["images"])

    assert images()["trainer"].endswith(f"/trainer:{__version__}")
    given = images(
        "--set", "images.trainer=host:5000/t,images.rollout=r/x@sha256:0a,images.pullPolicy=Always"
    )
    assert given == {
        "trainer": f"host:5000/t:{__version__}",
        "rollout": "r/x@sha256:0a",
        "pullPolicy": "Always",
    }
    refused = _helm("--set", "images.trainer=t:99.0.0,images.rollout=x")
    assert refused.returncode != 0 and f"versions 99.0.0 and {__version__} differ" in refused.stderr


def test_another_name_replaces_the_releases_name_everywhere() -> None:
    everything = (
        "watchNamespaces={team-a},metrics.podMonitor=true,metrics.prometheusRule=true,metrics.dashboards=true,"
        "gpuHealth.taints=true,admissionPolicies.podTemplates.enabled=true"
    )
    plain = _helm("--set", everything).stdout
    named = _helm("--set", f"{everything},fullnameOverride=elsewhere").stdout
    kept = {"app.kubernetes.io/instance: ops", '"unit": "ops"'}  # the latter is Grafana's

    def lines(text: str, name: str) -> list[str]:
        for part in kept:
            text = text.replace(part, "")
        renamed = re.sub(rf"\b{name}\b", "NAME", text)
        return sorted(line for line in renamed.splitlines() if "checksum/settings" not in line)

    assert lines(named, "elsewhere") == lines(plain, "ops")
    assert "system:serviceaccount:grpo-system:elsewhere'" in named and all(part in named for part in kept)


def test_nodes_are_written_only_when_the_chart_allows_it() -> None:
    read = {"list", "watch"}
    assert _node_rights() == {"nodes": read}
    both = ("--set", "gpuHealth.nodeConditions=true,gpuHealth.taints=true")
    assert _node_rights(*both) == {"nodes": read | {"patch"}, "nodes/status": {"patch"}}
    assert _node_rights(*both, "--set", "gpuHealth.enabled=false") == {"nodes": read}


def test_strikes_are_kept_in_one_config_map_of_the_operators_namespace() -> None:
    objects = _render("--set", "watchNamespaces={team-a}")
    (role,) = _of(objects, "Role", "ops-gpu-health")
    assert "namespace" not in role["metadata"], "that of the release"
    named = [rule for rule in role["rules"] if "patch" in rule["verbs"]]
    assert [rule["resourceNames"] for rule in named] == [["grpo-gpu-health"]]
    (settings,) = _of(objects, "ConfigMap", "ops-settings")
    loaded = json.loads(settings["data"]["settings.json"])["gpuHealth"]
    assert loaded["windowHours"] == 24 and loaded["maxNodesPercent"] == 10 and not loaded["taints"]


def test_the_operator_gets_the_limits_of_phases() -> None:
    (settings,) = _of(_render("--set", "metrics.phaseSeconds.Parked=60"), "ConfigMap", "ops-settings")
    loaded = json.loads(settings["data"]["settings.json"])["phaseSeconds"]
    assert loaded["Parked"] == 60 and loaded["Training"] == 1800


def test_the_operator_reads_only_two_secrets_of_a_namespace(api: Api) -> None:
    """Checked by the API server's own authorizer."""
    everywhere = _render("--set", "allNamespaces=true")
    rights = [o for o in everywhere if o["kind"] in ("ClusterRole", "ClusterRoleBinding")]
    api.ok("apply", "-f", "-", stdin=yaml.safe_dump_all(rights))
    asked = [
        ("get", "secrets/grpo-agents"),
        ("get", "secrets/grpo-agents-epoch"),
        ("patch", "secrets/grpo-agents-epoch"),
        ("create", "secrets"),
        ("get", "secrets/other"),
        ("list", "secrets"),
        ("patch", "secrets/grpo-agents"),
        ("patch", "secrets/job-12345678-key"),
        ("get", "secrets/job-12345678-key"),
        ("delete", "secrets/grpo-agents"),
    ]
    user = "--as=system:serviceaccount:grpo-system:ops"
    answers = [api.run("auth", "can-i", *question, user).stdout.strip() for question in asked]
    api.ok("delete", "-f", "-", stdin=yaml.safe_dump_all(rights))
    assert answers == ["yes"] * 4 + ["no"] * 6


def test_every_pod_of_the_chart_meets_the_restricted_standard() -> None:
    objects = _render()
    specs = [o["spec"]["template"]["spec"] for o in objects if o["kind"] == "Deployment"]
    specs += [o["spec"] for o in objects if o["kind"] == "Pod"]
    assert len(specs) == 2
    for spec in specs:
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_probes_ask_the_operators_own_server_and_liveness_is_the_more_patient() -> None:
    (deployment,) = _of(_render(), "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["health"] == HEALTH_PORT and not [a for a in container["args"] if "liveness" in a]
    probes = {name: container[f"{name}Probe"] for name in ("startup", "liveness", "readiness")}
    assert {probe["httpGet"]["port"] for probe in probes.values()} == {"health"}
    paths = {name: probe["httpGet"]["path"] for name, probe in probes.items()}
    assert paths == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
    patience = {name: probe["periodSeconds"] * probe["failureThreshold"] for name, probe in probes.items()}
    assert patience["readiness"] < patience["liveness"] < patience["startup"]


def test_monitoring_objects_are_rendered_only_when_enabled() -> None:
    plain = {o["kind"] for o in _render()}
    assert not plain & {"PodMonitor", "PrometheusRule"}
    asked = _render("--set", "metrics.podMonitor=true,metrics.prometheusRule=true,metrics.dashboards=true")
    (rule,) = _of(asked, "PrometheusRule")
    alerts = [r["alert"] for group in rule["spec"]["groups"] for r in group["rules"]]
    assert len(alerts) == len(set(alerts)) >= 5
    assert "runbook_url" not in str(rule)
    (rule,) = _of(
        _render("--set", "metrics.prometheusRule=true,metrics.runbooks=https://a/b"), "PrometheusRule"
    )
    urls = [r["annotations"]["runbook_url"] for group in rule["spec"]["groups"] for r in group["rules"]]
    assert urls == [f"https://a/b#{name.lower()}" for name in alerts]
    for name in ("ops", "ops-jobs", "ops-trainers", "ops-engines"):
        assert _of(asked, "PodMonitor", name), name
    labelled = _render(
        "--set", "metrics.podMonitor=true,metrics.prometheusRule=true,metrics.labels.release=stack"
    )
    kinds = [o for o in labelled if o["kind"] in ("PodMonitor", "PrometheusRule")]
    assert len(kinds) == 5 and all(o["metadata"]["labels"] == {"release": "stack"} for o in kinds)
    (operator,) = _of(asked, "PodMonitor")
    assert operator["spec"]["podMetricsEndpoints"][0]["honorLabels"], "series name the jobs' namespaces"
    (dashboards,) = _of(asked, "ConfigMap", "ops-dashboards")
    assert dashboards["metadata"]["labels"] == {"grafana_dashboard": "1"}
    assert dashboards["data"] == files()


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("imagee.tag=1", "imagee"),
        ("image.repository=", "image.repository|/image/repository"),
        ("fullnameOverride=Ops_1", "fullnameOverride"),
        ("watchNamespaces=all", "watchNamespaces"),
        ("allNamespaces=often", "allNamespaces"),
        ("images.pullPolicy=Sometimes", "pullPolicy"),
        ("gpuHealth.maxNodesPercent=0", "maxNodesPercent"),
        ("metrics.phaseSeconds.Park=60", "phaseSeconds"),
    ],
)
def test_a_wrong_value_is_refused_by_the_schema(setting: str, text: str) -> None:
    done = _helm("--set", setting)
    assert done.returncode != 0
    assert any(part in done.stderr for part in text.split("|")), done.stderr


@pytest.mark.parametrize("rollout", ["r/x:0.2.0", "r/x:v0.2.0-cu13", "r:5000/x:0.2.0@sha256:0a"])
def test_images_of_two_releases_are_refused_with_both_named(rollout: str) -> None:
    done = _helm("--set", f"images.trainer=host:5000/t:0.1.0,images.rollout={rollout}")
    assert done.returncode != 0
    assert f"images.trainer is host:5000/t:0.1.0, images.rollout is {rollout}" in done.stderr
    assert "versions 0.1.0 and 0.2.0 differ" in done.stderr


@pytest.mark.parametrize(
    "rollout", [f"r/x:v{__version__}-cu13", "r/x:3f9ac2", "r/x@sha256:0a", "host:5000/x", "r/x:nightly-0.2.0"]
)
def test_tags_of_one_version_and_tags_without_one_are_accepted(rollout: str) -> None:
    assert _of(
        _render("--set", f"images.trainer=t:{__version__},images.rollout={rollout}"),
        "ConfigMap",
        "ops-settings",
    )


def test_a_real_api_server_accepts_the_chart(api: Api) -> None:
    """Stricter than schemas: defaulting, validation and admission of the API server itself."""
    api.run("create", "namespace", "grpo-system")
    for arguments in ((), ("--set", "allNamespaces=true"), ("--set", "metrics.dashboards=true")):
        objects = yaml.safe_dump_all(_render(*arguments))
        api.ok(
            "apply", "--dry-run=server", "--validate=strict", "-n", "grpo-system", "-f", "-", stdin=objects
        )


def test_the_operator_requests_only_the_listed_namespaces(api: Api, proxy: ApiProxy, tmp_path: Any) -> None:
    """A proxy in front of a real API server records the requests; only pods of jobs are listed."""
    directory = tmp_path / "operator"
    directory.mkdir()
    with operator_process(directory, proxy.kubeconfig, namespaces=("default",)):
        until(
            "the cache is complete",
            lambda: "the cache is complete" in (directory / "operator.log").read_text(),
            30,
        )
    asked = {path.split("?")[0] for path in proxy.paths}
    wide = {path for path in asked if "/namespaces/default/" not in path}
    kinds = {
        path.rsplit("/", 1)[1]
        for path in wide
        if path.startswith(("/api/v1/", "/apis/")) and path.count("/") > 3
    }
    assert "/api/v1/namespaces" in asked, "the chart grants it where namespaces are listed, and only there"
    pods = [unquote(path) for path in proxy.paths if "/namespaces/default/pods?" in path]
    assert pods and all(POOL in path for path in pods), "pods that are no job's are asked for"
    assert not kinds & {
        "pods",
        "grpojobs",
        "rolloutpools",
        "rayclusters",
        "configmaps",
        "services",
        "secrets",
    }


@pytest.mark.slow  # builds promtool
def test_alerts_fire_only_in_their_conditions() -> None:
    """Prometheus' own tool reads the rules and runs them against the series of a test file."""
    build_all(("promtool",))
    rules, cases = CHART / "files" / "rules.yaml", Path(__file__).with_name("rules_test.yaml")
    for arguments in (("check", "rules", "--lint=all", "--lint-fatal", rules), ("test", "rules", cases)):
        done = subprocess.run([binary("promtool"), *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    named = {case["alertname"] for test in _cases(cases) for case in test["alert_rule_test"]}
    groups = yaml.safe_load(rules.read_text())["groups"]
    assert named == {rule["alert"] for group in groups for rule in group["rules"]}, "an alert without a case"


def _cases(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load(file.read_text())["tests"])
