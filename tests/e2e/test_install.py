"""The installed release answers to its own test."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from grpo_devcluster.gobuild import binary
from grpo_devcluster.install import NAMESPACE
from grpo_devcluster.paths import REPO
from support.faults import until

_REFUSED = "refused"  # name of the job whose status the API server refuses
# Whether it is in force shows at a job named probe.
_POLICY = f"""\
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {{name: refuses-status}}
spec:
  failurePolicy: Fail
  matchConstraints:
    resourceRules:
      - apiGroups: [rl.grpo.dev]
        apiVersions: ["*"]
        operations: [CREATE, UPDATE]
        resources: [grpojobs, grpojobs/status]
  validations:
    - expression: object.metadata.name != 'probe'
      message: refused by the test
    - expression: >-
        object.metadata.name != '{_REFUSED}' || !has(request.subResource) || request.subResource != 'status'
      message: refused by the test
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {{name: refuses-status}}
spec: {{policyName: refuses-status, validationActions: [Deny]}}
"""


class _Kubectl:
    """kubectl with the kubeconfig of the devcluster."""

    def __init__(self, kubeconfig: Path) -> None:
        self._command = [str(binary("kubectl")), f"--kubeconfig={kubeconfig}"]

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [*self._command, *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)

    def ok(self, *arguments: str, stdin: str = "") -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout


def _job(name: str) -> str:
    job: dict[str, Any] = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())
    job["metadata"]["name"], job["spec"]["suspend"] = name, True
    return yaml.safe_dump(job)


def _errors(kubectl: _Kubectl) -> float:
    """Return the number of reconciles of GRPOJobs that have failed in the operator's process."""
    selector = "app.kubernetes.io/name=grpo-operator"
    (pod,) = json.loads(kubectl.ok("-n", NAMESPACE, "get", "pods", "-l", selector, "-o", "json"))["items"]
    text = httpx.get(f"http://{pod['status']['podIP']}:9090/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith("grpo_reconciles_total")]
    return sum(float(line.split()[-1]) for line in lines if 'result="error"' in line)


@pytest.fixture
def passed_error(kubeconfig: Path) -> Iterator[None]:
    """Let the operator fail to write a status, until the API server takes it."""
    kubectl = _Kubectl(kubeconfig)
    kubectl.ok("apply", "-f", "-", stdin=_POLICY)
    try:
        probe = "apply", "--dry-run=server", "-f", "-"
        until("the policy is in force", lambda: kubectl.run(*probe, stdin=_job("probe")).returncode, 60)
        kubectl.ok("apply", "-f", "-", stdin=_job(_REFUSED))
        until("a reconcile has failed", lambda: _errors(kubectl), 60)
    finally:
        kubectl.ok("delete", "-f", "-", stdin=_POLICY)
    phase = "get", "grpojob", _REFUSED, "-o", "jsonpath={.status.phase}"
    until("the status is written", lambda: kubectl.ok(*phase), 120)
    yield
    kubectl.ok("delete", "grpojob", _REFUSED, "--cascade=foreground")


def test_helm_test_passes_after_an_error_that_has_passed(kubeconfig: Path, passed_error: None) -> None:
    command = [str(binary("helm")), "test", "grpo-operator", "-n", NAMESPACE, "--timeout", "2m"]
    done = subprocess.run(
        [*command, f"--kubeconfig={kubeconfig}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "Succeeded" in done.stdout, done.stdout + done.stderr
