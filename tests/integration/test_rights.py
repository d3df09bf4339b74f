"""The operator with its own account and the chart's roles: it lacks no right, and uses all that it has."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from grpo_devcluster.controlplane import audit_log
from grpo_devcluster.operator_process import operator_process
from grpo_devcluster.results import record_from_test
from grpo_devcluster.rights import Right, granted, refused, used
from grpo_operator.api.names import EPOCH_SECRET, MASTER_SECRET
from grpo_operator.plan.gpu_health.node_state import TAINT
from support.api_server import WHOLE, Api, lose_controller, running, until
from support.operator_account import account, roles, token, user, write_kubeconfig
from support.removal_pods import end, remover
from support.sick_agents import fall_ill, gpu_job, serving_sick_agent, trainers

NAMESPACE = "grpo-system"
USER = user(NAMESPACE)
# Rights that no request shows.
JUSTIFIED = {
    # Asked for by the admission plugin OwnerReferencesPermissionEnforcement, which is off by default.
    Right("rl.grpo.dev", "grpojobs/finalizers", "update"),
    Right("rl.grpo.dev", "rolloutpools/finalizers", "update"),
}


@pytest.fixture(scope="module", autouse=True)
def operator(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    directory = tmp_path_factory.mktemp("operator")
    # Modules before this one leave the Secrets, and then this operator would not need to create them.
    api.ok("delete", "secret", MASTER_SECRET, EPOCH_SECRET, "--ignore-not-found")
    changes = {"namespace": NAMESPACE, "gpuHealth": {"nodeConditions": True, "taints": True}}
    changes["keys"] = {"overlapSeconds": 5}
    with account(api, NAMESPACE):
        own = write_kubeconfig(directory / "own.kubeconfig", token(api, NAMESPACE))
        with operator_process(directory, own, changes=changes):
            yield


def _finish(api: Api, name: str) -> None:
    """Let the job end and be old: no controller of a KWOK node does that."""
    ended = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    status = json.dumps({"status": {"phase": "Succeeded", "finishedAt": ended}})
    api.ok("patch", "grpojob", name, "--subresource=status", "--type=merge", "-p", status)
    ttl = json.dumps({"spec": {"ttlSecondsAfterFinished": 0}})
    api.ok("patch", "grpojob", name, "--type=merge", "-p", ttl)


def _gone(api: Api, kind: str, name: str) -> None:
    until(f"{kind} {name} is gone", lambda: not api.exists(kind, name), 90)


def test_a_job_lives_and_ends(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    tiny["spec"]["checkpoint"]["deletionPolicy"] = "Delete"
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    api.ok("scale", "rpool", "tiny-moe-rollout", "--replicas=3")
    until("three engines", lambda: running(api)["rollout"] == 3, 60)
    asked = "rl.grpo.dev/profile"
    api.ok("annotate", "grpojob", "tiny-moe", f"{asked}=stacks")
    until("accepted", lambda: asked not in api.get("grpojob", "tiny-moe")["metadata"]["annotations"], 30)
    tiny["spec"]["suspend"] = True
    assert api.apply(tiny).returncode == 0
    lose_controller(api, "tiny-moe")
    until("no pod is left", lambda: not api.get("pods")["items"], 60)
    _finish(api, "tiny-moe")
    end(api, remover(api))
    _gone(api, "grpojob", "tiny-moe")


def test_a_cluster_without_an_owner_is_deleted_with_its_job(
    api: Api, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(2)
    tiny["spec"]["scheduling"] = {"gangScheduler": "kai"}
    assert api.apply(tiny).returncode == 0
    until("the RayCluster", lambda: api.exists("raycluster", "tiny-moe"), 60)
    api.ok("delete", "grpojob", "tiny-moe")
    _gone(api, "raycluster", "tiny-moe")


def test_a_pool_without_a_job_gets_engines(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    spec = tiny["spec"]["rollout"]["template"] | {"model": tiny["spec"]["model"]}
    pool = {"apiVersion": "rl.grpo.dev/v1alpha1", "kind": "RolloutPool", "metadata": {"name": "standing"}}
    assert api.apply(pool | {"spec": spec}).returncode == 0
    until("two engines", lambda: running(api)["rollout"] == 2, 60)
    until("a status", lambda: api.get("rpool", "standing").get("status", {}).get("replicas") == 2, 30)
    api.ok("delete", "rpool", "standing")


def test_sick_gpus_move_pods_and_keys_are_replaced(api: Api, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(3)
    assert api.apply(gpu_job(tiny)).returncode == 0
    until("the training pods", lambda: len(trainers(api)) == 2, 60)
    (node, _), *_ = sorted(trainers(api).items())
    (spare,) = {f"fake-{i}" for i in range(3)} - trainers(api).keys()
    api.ok("cordon", spare)  # so that the pod returns to its node
    epoch, asked = ("secret", "grpo-agents-epoch"), "rl.grpo.dev/rotate"
    api.ok("annotate", *epoch, f"{asked}=test")
    with serving_sick_agent():
        for _ in range(2):
            _fall_ill_and_wait(api, node)
        until("quarantine", lambda: _tainted(api, node), 30)
    until("an epoch", lambda: asked not in api.get(*epoch)["metadata"].get("annotations", {}), 60)


def _fall_ill_and_wait(api: Api, node: str) -> None:
    name, uid = trainers(api)[node]
    fall_ill(api, name)
    until("a verdict", lambda: _tainted(api, node) or trainers(api).get(node, ("", uid))[1] != uid, 60)


def _tainted(api: Api, node: str) -> bool:
    return any(taint["key"] == TAINT for taint in api.get("node", node)["spec"].get("taints") or [])


def test_the_operator_lacks_no_right_and_uses_all_that_it_has() -> None:
    """After the tests above, which use every part of the operator that asks the API server."""
    log = list(audit_log())
    rights, needed = granted(roles(NAMESPACE)), used(log, USER)
    assert len(needed) > 20, "the audit log shows the operator"
    assert sorted(map(str, refused(log, USER))) == []
    unused = sorted(map(str, rights - needed - JUSTIFIED))
    record_from_test("reliability", {"audit_rules": len(rights), "audit_unused_rules": len(unused)})
    assert unused == [], "granted but never used"
    assert not JUSTIFIED & needed, "no longer in need of an excuse"
