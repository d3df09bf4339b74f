"""Sick GPUs on KWOK nodes: a real API server, scheduler and KubeRay; only the agents are stand-ins."""

from collections.abc import Iterator
from typing import Any

import pytest

from grpo_devcluster.operator_process import operator_process
from grpo_operator.plan.gpu_health.node_state import CONDITION, TAINT
from support.api_server import Api, until
from support.sick_agents import fall_ill, gpu_job, serving_sick_agent, trainers


@pytest.fixture
def sick_agent() -> Iterator[None]:
    with serving_sick_agent():
        yield


@pytest.fixture(scope="module", autouse=True)
def operator(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An operator that may write nodes, and keeps its strikes in the namespace default."""
    changes = {"namespace": "default", "gpuHealth": {"nodeConditions": True, "taints": True}}
    with operator_process(tmp_path_factory.mktemp("operator"), changes=changes):
        yield
    api.run("delete", "configmap", "grpo-gpu-health")


def _condition(api: Api, node: str) -> dict[str, Any]:
    found = api.get("node", node)["status"].get("conditions") or []
    return next((c for c in found if c["type"] == CONDITION), {})


def _tainted(api: Api, node: str) -> bool:
    return any(taint["key"] == TAINT for taint in api.get("node", node)["spec"].get("taints") or [])


@pytest.mark.fault(
    row="7",
    point="an agent reports XID 79, twice",
    witness="the node's condition, event GpuSick",
    bound="condition in 30 s, another pod in 60 s, quarantine in 30 s",
    partial="stand-in agent on simulated nodes; nothing compared",
)
@pytest.mark.slow
def test_a_sick_gpu_moves_pods_once_and_the_second_strike_is_quarantine(
    api: Api, tiny: dict[str, Any], fake_nodes: Any, sick_agent: None
) -> None:
    fake_nodes(3)
    assert api.apply(gpu_job(tiny)).returncode == 0
    until("the training pods", lambda: len(trainers(api)) == 2, 60)
    (node, (pod, uid)), *_ = sorted(trainers(api).items())
    (spare,) = {f"fake-{i}" for i in range(3)} - trainers(api).keys()
    api.ok("cordon", spare)  # so that the pod returns to its node
    fall_ill(api, pod)
    until("the node's condition", lambda: _condition(api, node).get("status") == "False", 30)
    assert _condition(api, node)["reason"] == "Xid79" and "GPU-a" in _condition(api, node)["message"]
    until("another pod", lambda: trainers(api).get(node, ("", uid))[1] != uid, 60)
    assert not _tainted(api, node)
    events = api.ok("get", "events")
    assert "GpuSick" in events and "strike 1 of 2" in events
    fall_ill(api, trainers(api)[node][0])
    until("quarantine", lambda: _tainted(api, node), 30)
    api.ok("uncordon", spare)
    until("both pods run elsewhere", lambda: len(trainers(api)) == 2 and node not in trainers(api), 60)
    (line,) = api.get("grpo", "tiny-moe")["status"]["sickNodes"]
    assert line.startswith(f"node {node}: XID 79") and line.endswith("in quarantine")
    assert node in api.get("configmap", "grpo-gpu-health")["data"]
    api.ok("taint", "node", node, f"{TAINT}-")
    until("nothing is remembered", lambda: not api.get("configmap", "grpo-gpu-health").get("data"), 30)
    until("a good condition", lambda: _condition(api, node)["status"] == "True", 30)
