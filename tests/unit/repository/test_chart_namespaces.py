"""Namespaces that the chart's operator watches, and has rights in."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from grpo_devcluster.install import devcluster_values
from grpo_operator.handlers.leader import lease_name
from support.chart import NAMESPACE, Objects, helm, of, render

ALL = ("--set", "allNamespaces=true")
TEAMS = ("--set", "watchNamespaces={team-b,team-a,team-b}")
# Of the cluster, which no Role can give.
CLUSTER = {"nodes": {"list", "watch"}, "customresourcedefinitions": {"list", "watch"}}
LISTED = CLUSTER | {"namespaces": {"list", "watch"}}


def _rights(objects: Objects, kind: str, namespace: str | None = None) -> dict[str, set[str]]:
    """Return the verbs for each resource that a role of the operator gives in a namespace."""
    rights: dict[str, set[str]] = {}
    for role in of(objects, kind):
        if role["metadata"].get("namespace") == namespace:
            for rule in role["rules"]:
                for resource in rule["resources"]:
                    rights.setdefault(resource, set()).update(rule["verbs"])
    return rights


def _watched(objects: Objects) -> tuple[list[str], list[str]]:
    """Return the namespaces that the operator is started with, and those of its settings."""
    (deployment,), (settings,) = of(objects, "Deployment"), of(objects, "ConfigMap", "ops-settings")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    arguments = [argument for argument in container["args"] if argument != "--standalone"]
    named = [a.removeprefix("--namespace=") for a in arguments if a != "--all-namespaces"]
    assert bool(named) != ("--all-namespaces" in arguments)
    return named, json.loads(settings["data"]["settings.json"])["watchNamespaces"]


@pytest.mark.parametrize(
    ("values", "namespaces"), [((), [NAMESPACE]), (TEAMS, ["team-a", "team-b"])], ids=["default", "listed"]
)
def test_rights_end_at_the_watched_namespaces(values: tuple[str, ...], namespaces: list[str]) -> None:
    objects = render(*values)
    assert _watched(objects) == (namespaces, namespaces)
    assert _rights(objects, "ClusterRole") == LISTED, "nothing else of all namespaces"
    places = sorted(role["metadata"]["namespace"] for role in of(objects, "Role"))
    assert places == namespaces
    assert places == sorted(o["metadata"]["namespace"] for o in of(objects, "RoleBinding"))
    for namespace in namespaces:
        rights = _rights(objects, "Role", namespace)
        assert rights["pods"] == {"list", "watch", "create", "delete"} and "secrets" in rights


def test_all_namespaces_are_watched_when_asked_for() -> None:
    objects = render(*ALL)
    assert _watched(objects) == ([], []) and not of(objects, "Role")
    rights = _rights(objects, "ClusterRole")
    assert rights.items() >= CLUSTER.items() and {"pods", "secrets", "grpojobs"} <= rights.keys()
    assert "namespaces" not in rights


@pytest.mark.parametrize(
    ("values", "namespaces"), [((), (NAMESPACE,)), (TEAMS, ("team-a", "team-b")), (ALL, ())]
)
def test_the_chart_grants_the_lease_that_the_operator_asks_for(
    values: tuple[str, ...], namespaces: tuple[str, ...]
) -> None:
    (role,) = of(render(*values), "Role", "ops-leader")
    assert role["rules"][0]["resourceNames"] == [lease_name(namespaces)]


def test_a_list_and_all_namespaces_exclude_each_other() -> None:
    done = helm(*ALL, *TEAMS)
    assert done.returncode != 0
    assert "allNamespaces is true, and watchNamespaces is [team-b, team-a, team-b]" in done.stderr


def test_the_notes_name_the_watched_namespaces() -> None:
    def notes(*values: str) -> str:
        return helm("--dry-run=client", *values, command=("install",)).stdout.partition("NOTES:\n")[2]

    assert f"watches {NAMESPACE}.\n" in notes() and f"my-job.yaml -n {NAMESPACE}\n" in notes()
    assert "watches team-a, team-b.\n" in notes(*TEAMS)
    assert "watches all namespaces.\n" in notes(*ALL) and "my-job.yaml\n" in notes(*ALL)


def test_the_devcluster_has_jobs_in_several_namespaces(tmp_path: Path) -> None:
    values = tmp_path / "values.json"
    values.write_text(json.dumps(devcluster_values({"operator": "o:1", "trainer": "t:1", "rollout": "r:1"})))
    assert _watched(render("-f", str(values))) == ([], [])


@contextmanager
def _cluster_with(deployment: dict[str, Any], folder: Path) -> Iterator[str]:
    """Serve the part of an API server that Helm reads, and yield the path of a kubeconfig."""
    resource = {"name": "deployments", "kind": "Deployment", "namespaced": True, "verbs": ["get"]}
    kind = {"groupVersion": "apps/v1", "version": "v1"}
    answers: dict[str, dict[str, Any]] = {
        "/version": {"major": "1", "minor": "35", "gitVersion": "v1.35.4"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/api/v1": {"kind": "APIResourceList", "groupVersion": "v1", "resources": []},
        "/apis": {"kind": "APIGroupList", "groups": [{"name": "apps", "versions": [kind]}]},
        "/apis/apps/v1": {"kind": "APIResourceList", "groupVersion": "apps/v1", "resources": [resource]},
        f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/ops": deployment,
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.partition("?")[0])
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(found or {"kind": "Status", "code": 404}).encode())

        def log_message(self, *arguments: object) -> None:
            """Print nothing."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    place = {"name": "it", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}
    context = {"name": "it", "context": {"cluster": "it", "user": ""}}
    config = {"apiVersion": "v1", "kind": "Config", "clusters": [place], "contexts": [context]}
    file = folder / "kubeconfig"
    file.write_text(json.dumps(config | {"current-context": "it"}))
    yield str(file)
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("before", "values", "accepted"),
    [(ALL, (), False), (ALL, ALL, True), (ALL, TEAMS, True), ((), (), True), (TEAMS, (), True)],
)
def test_an_upgrade_leaves_no_namespace_because_of_the_default(
    before: tuple[str, ...], values: tuple[str, ...], accepted: bool, tmp_path: Path
) -> None:
    (deployment,) = of(render(*before), "Deployment")
    with _cluster_with(deployment, tmp_path) as kubeconfig:
        done = helm("--is-upgrade", "--dry-run=server", "--kubeconfig", kubeconfig, *values)
    refused = f"set allNamespaces=true to keep all, or watchNamespaces={{{NAMESPACE}}}" in done.stderr
    # What is rendered Helm would compare with schemas, which this server lacks.
    rendered = "error validating data: failed to download openapi" in done.stderr
    assert (rendered, refused) == (accepted, not accepted), done.stderr
