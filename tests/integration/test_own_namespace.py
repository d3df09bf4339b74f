"""The operator with the rights that the chart gives by default: those of its own namespace."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_devcluster.controlplane import audit_log
from grpo_devcluster.operator_process import operator_process
from grpo_devcluster.rights import refused, used
from support.api_server import POOL, WHOLE, Api, until
from support.operator_account import account, token, user, write_kubeconfig

NAMESPACE = "grpo-system"
USER = user(NAMESPACE)


@pytest.fixture(scope="module", autouse=True)
def operator(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory = tmp_path_factory.mktemp("operator")
    with account(api, NAMESPACE, everywhere=False):
        own = write_kubeconfig(directory / "own.kubeconfig", token(api, NAMESPACE))
        with operator_process(directory, own, (NAMESPACE,), {"namespace": NAMESPACE}):
            yield


@pytest.fixture
def inside(api: Api, tiny: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The tiny manifest for the operator's namespace; its job is gone before the nodes are."""
    yield tiny | {"metadata": {"name": "inside", "namespace": NAMESPACE}}
    api.ok("delete", "grpojobs", "--all", "-n", NAMESPACE)
    until("nothing is left", lambda: not api.get("pods", "-n", NAMESPACE)["items"], 90)


def _running(api: Api) -> Counter[str]:
    items = api.get("pods", "-n", NAMESPACE)["items"]
    return Counter(p["metadata"]["labels"][POOL] for p in items if p["status"].get("phase") == "Running")


def test_jobs_of_its_namespace_run_and_others_are_left_alone(
    api: Api, tiny: dict[str, Any], inside: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(2)
    for job in (tiny, inside):
        assert api.apply(job).returncode == 0
    until("all pods run", lambda: _running(api) == WHOLE, 90)
    assert not api.get("rayclusters")["items"], "of the namespace default"
    assert "status" not in api.get("grpojob", "tiny-moe")
    log = list(audit_log())
    assert used(log, USER), "the audit log shows the operator"
    assert sorted(map(str, refused(log, USER))) == [], "the chart's roles are enough"


def test_its_account_has_no_rights_in_other_namespaces(api: Api) -> None:
    """Checked by the API server's own authorizer."""
    asked = (
        ("get", "secrets/grpo-agents"),
        ("create", "pods"),
        ("create", "rayclusters.ray.io"),
        ("patch", "grpojobs.rl.grpo.dev"),
    )
    for namespace, answer in ((NAMESPACE, "yes"), ("default", "no")):
        for question in asked:
            given = ("auth", "can-i", *question, f"--as={USER}", "-n", namespace)
            assert api.run(*given).stdout.strip() == answer, (namespace, question)
