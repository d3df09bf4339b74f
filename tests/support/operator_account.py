"""The operator's own account with the roles of the chart, on the test's API server."""

import base64
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from grpo_devcluster.certs import PKI
from grpo_devcluster.gobuild import binary
from grpo_devcluster.install import CHART, PATHS_OF_NODES
from grpo_devcluster.settings import SERVER
from support.api_server import Api

RELEASE = "ops"
_KINDS = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}
_POLICIES = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}  # of which none is in its way


def user(namespace: str) -> str:
    """Return the name of the account in requests."""
    return f"system:serviceaccount:{namespace}:{RELEASE}"


def roles(namespace: str, everywhere: bool = True) -> list[dict[str, Any]]:
    """Return what the chart makes for the operator's account, with all optional rights.

    ``everywhere``: in all namespaces, and not only in the account's own.
    """
    command = [str(binary("helm")), "template", RELEASE, str(CHART), "-n", namespace]
    command += ["--set", "gpuHealth.nodeConditions=true,gpuHealth.taints=true"]
    command += ["--set-json", f"admissionPolicies={json.dumps(PATHS_OF_NODES)}"]
    command += ["--set", f"allNamespaces={str(everywhere).lower()}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rendered = [found for found in yaml.safe_load_all(done.stdout) if found]
    objects = [found for found in rendered if found["kind"] in _KINDS | _POLICIES]
    # Roles of users are not the operator's.
    return [o for o in objects if not o["metadata"]["name"].endswith(("-viewer", "-editor"))]


@contextmanager
def account(api: Api, namespace: str, everywhere: bool = True) -> Iterator[None]:
    """Create the account with its roles for the block."""
    objects = yaml.safe_dump_all(roles(namespace, everywhere))
    api.run("create", "namespace", namespace)
    api.ok("apply", "-n", namespace, "-f", "-", stdin=objects)
    try:
        yield
    finally:
        api.ok("delete", "-n", namespace, "-f", "-", stdin=objects)


def token(api: Api, namespace: str) -> str:
    """Return a token of the account; each has an id of its own."""
    return api.ok("create", "token", RELEASE, "-n", namespace).strip()


def token_id(token: str) -> str:
    """Return the id by which the audit log names the token."""
    claims = token.split(".")[1]
    return f"JTI={json.loads(base64.urlsafe_b64decode(claims + '=' * (-len(claims) % 4)))['jti']}"


def write_kubeconfig(path: Path, token: str) -> Path:
    """Write a kubeconfig with the token and return its path."""
    authority = base64.b64encode((PKI / "ca.crt").read_bytes()).decode()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "it", "cluster": {"server": SERVER, "certificate-authority-data": authority}}],
        "users": [{"name": "it", "user": {"token": token}}],
        "contexts": [{"name": "it", "context": {"cluster": "it", "user": "it"}}],
        "current-context": "it",
    }
    path.write_text(json.dumps(config))
    return path
