"""Prometheus beside the cluster, as Prometheus Operator configures it from the chart's monitors and rules."""

import base64
import contextlib
import gzip
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from grpo_devcluster import processes
from grpo_devcluster.addons import kubectl, served
from grpo_devcluster.certs import PKI
from grpo_devcluster.gobuild import binary, build_all, module_directory
from grpo_devcluster.install import install_operator
from grpo_devcluster.paths import KUBECONFIG
from support.engine_server import free_port
from support.faults import until

_NAMESPACE, _NAME = "monitoring", "test"
# kube-prometheus-stack selects the PodMonitors and rules that have the label of its own release.
RELEASE = {"release": "stack"}
# PodMonitors of the chart, with the pods of the operator and of a job with two ranks and two engines.
TARGETS = {
    "grpo-operator": 1,
    "grpo-operator-jobs": 1,
    "grpo-operator-trainers": 2,
    "grpo-operator-engines": 2,
}
_OF_ITS_POD = {"SHARD": "0", "POD_NAME": f"prometheus-{_NAME}-0"}
_OBJECTS = f"""\
apiVersion: v1
kind: Namespace
metadata: {{name: {_NAMESPACE}}}
---
apiVersion: monitoring.coreos.com/v1
kind: Prometheus
metadata: {{name: {_NAME}, namespace: {_NAMESPACE}}}
spec:
  replicas: 0  # its configuration is what counts; the server runs beside the cluster
  podMonitorSelector: {{matchLabels: {json.dumps(RELEASE)}}}
  podMonitorNamespaceSelector: {{}}
  ruleSelector: {{matchLabels: {json.dumps(RELEASE)}}}
  ruleNamespaceSelector: {{}}
  evaluationInterval: 5s
"""


class Prometheus:
    """Client of a running Prometheus."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1", timeout=10)

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series that an expression has now."""
        return list(self._get("query", query=expression)["result"])

    def targets(self) -> list[dict[str, Any]]:
        return list(self._get("targets", state="active")["activeTargets"])

    def alerts(self) -> dict[str, dict[str, Any]]:
        """Return the alerting rules with their state and health, by name."""
        groups = self._get("rules", type="alert")["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    def _get(self, path: str, **parameters: str) -> dict[str, Any]:
        reply = self._http.get(f"/{path}", params=parameters)
        answer = reply.json()
        assert answer["status"] == "success", answer
        return dict(answer["data"])


@contextlib.contextmanager
def scraped(values: dict[str, Any], folder: Path, **metrics: Any) -> Iterator[Prometheus]:
    """Install the chart with its monitors, rules and dashboards; run a Prometheus that they configure.

    ``values``: of the chart. ``metrics``: more of its values below ``metrics``. ``folder``: for its series.
    """
    shown = {"podMonitor": True, "prometheusRule": True, "dashboards": True, "labels": RELEASE}
    with _prometheus_operator():
        install_operator(KUBECONFIG, values | {"metrics": shown | metrics})
        with _prometheus(folder) as server:
            yield server


@contextlib.contextmanager
def _prometheus_operator() -> Iterator[None]:
    """Run Prometheus Operator, with its kinds, as a process beside the cluster."""
    build_all(("prometheus", "prometheus-operator"))
    path = "github.com/prometheus-operator/prometheus-operator"
    kinds = module_directory("prometheus-operator", path) / "example" / "prometheus-operator-crd"
    kubectl("apply", "--server-side", "-f", kinds)
    until("its kinds are served", lambda: served("prometheusrules.monitoring.coreos.com"), 30)
    command: list[str | Path] = [
        binary("prometheus-operator"), f"--apiserver={_server()}", f"--ca-file={PKI / 'ca.crt'}",
        f"--cert-file={PKI / 'admin.crt'}", f"--key-file={PKI / 'admin.key'}",
        f"--web.listen-address=127.0.0.1:{free_port()}",
    ]  # fmt: skip
    processes.start("prometheus-operator", command)
    try:
        yield
    finally:
        processes.stop("prometheus-operator")


@contextlib.contextmanager
def _prometheus(folder: Path) -> Iterator[Prometheus]:
    """Run Prometheus as its operator configures it from the PodMonitors and rules of RELEASE."""
    kubectl("apply", "-f", "-", stdin=_OBJECTS)
    config = until("its configuration", _configuration, 60)
    rules = until("its rules", _rules, 60)
    for name, text in rules.items():
        (folder / f"{name}.rules.yaml").write_text(text)
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(_from_outside(config, folder)))
    port = free_port()
    command: list[str | Path] = [
        binary("prometheus"), f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'series'}", f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        until("Prometheus is ready", lambda: httpx.get(f"{url}/-/ready").is_success, 60)
        yield Prometheus(url)
    finally:
        server.terminate()
        server.wait(30)


def _server() -> str:
    """Return the address of the API server."""
    clusters = yaml.safe_load(KUBECONFIG.read_text())["clusters"]
    return str(clusters[0]["cluster"]["server"])


def _configuration() -> dict[str, Any] | None:
    """Return the configuration that the operator has written; None until it has all monitors."""
    name = f"prometheus-{_NAME}"
    found = kubectl("-n", _NAMESPACE, "get", "secret", name, "--ignore-not-found", "-o", "json")
    data = json.loads(found)["data"] if found else {}
    if "prometheus.yaml.gz" not in data:
        return None
    text = gzip.decompress(base64.b64decode(data["prometheus.yaml.gz"])).decode()
    for variable, value in _OF_ITS_POD.items():  # in a pod its sidecar does that
        text = text.replace(f"$({variable})", value)
    config = yaml.safe_load(text)
    return dict(config) if len(config["scrape_configs"]) >= len(TARGETS) else None


def _rules() -> dict[str, str]:
    """Return the rules that the operator has written, by name of their file."""
    name = f"prometheus-{_NAME}-rulefiles-0"
    found = kubectl("-n", _NAMESPACE, "get", "configmap", name, "--ignore-not-found", "-o", "json")
    return dict(json.loads(found).get("data") or {}) if found else {}


def _from_outside(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return the configuration with paths and access of a server that is not a pod; all else stays."""
    for scrape in config["scrape_configs"]:
        for discovery in scrape["kubernetes_sd_configs"]:
            discovery["kubeconfig_file"] = str(KUBECONFIG)
    return config | {"rule_files": [str(folder / "*.rules.yaml")]}
