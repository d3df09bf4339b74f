"""Sick GPUs on KWOK nodes: a real API server, scheduler and KubeRay; only the agents are stand-ins."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from grpo_devcluster.operator_process import operator_process
from grpo_operator.api.names import AGENT_PORT
from grpo_operator.plan.gpu_health.node_state import CONDITION, TAINT
from support.api_server import POOL, Api, until

FINDING = {
    "gpu": "GPU-a", "index": 3, "severity": "Sick", "reason": "Xid79", "text": "XID 79: fell off the bus",
    "since": time.time(),
}  # fmt: skip
TRAINERS = f"{POOL}=trainer"


class _Agent(BaseHTTPRequestHandler):
    """The agent of a pod on a node whose GPU 3 is lost."""

    def do_GET(self) -> None:
        found = self.path == "/v1/gpus"
        self.send_response(200 if found else 404)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"gpus": 8, "findings": [FINDING]} if found else {}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def sick_agent() -> Iterator[None]:
    """Answer for every pod whose address is 127.0.0.1."""
    server = ThreadingHTTPServer(("127.0.0.1", AGENT_PORT), _Agent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module", autouse=True)
def operator(api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """An operator that may write nodes, and keeps its strikes in the namespace default."""
    changes = {"namespace": "default", "gpuHealth": {"nodeConditions": True, "taints": True}}
    with operator_process(tmp_path_factory.mktemp("operator"), changes=changes):
        yield
    api.run("delete", "configmap", "grpo-gpu-health")


def _gpu_job(tiny: dict[str, Any]) -> dict[str, Any]:
    """Return the tiny job with all 8 GPUs of two nodes."""
    spec = tiny["spec"]
    spec["mode"] = "colocated"
    offload = dict.fromkeys(("parameters", "gradients", "optimizer"), True)
    spec["trainer"] |= {"device": "cuda", "gpusPerNode": 8, "offload": offload, "microBatchSizePerGpu": 1}
    spec["rollout"]["template"]["engine"] = {
        "device": "cuda", "tensorParallel": 8, "gpusPerNode": 8, "attentionDataParallel": 8,
        "contextLength": 256,
    }  # fmt: skip
    return tiny


def _trainers(api: Api) -> dict[str, tuple[str, str]]:
    """Return node -> name and UID of its running training pod."""
    return {
        p["spec"]["nodeName"]: (p["metadata"]["name"], p["metadata"]["uid"])
        for p in api.get("pods", "-l", TRAINERS)["items"]
        if p["status"]["phase"] == "Running" and not p["metadata"].get("deletionTimestamp")
    }


def _fall_ill(api: Api, pod: str) -> None:
    """Give a KWOK pod the address of the agent that reports a sick GPU."""
    status = {"status": {"podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}}
    api.ok("patch", "pod", pod, "--subresource=status", "--type=merge", "-p", json.dumps(status))


def _condition(api: Api, node: str) -> dict[str, Any]:
    found = api.get("node", node)["status"].get("conditions") or []
    return next((c for c in found if c["type"] == CONDITION), {})


def _tainted(api: Api, node: str) -> bool:
    return any(taint["key"] == TAINT for taint in api.get("node", node)["spec"].get("taints") or [])


def test_a_sick_gpu_moves_pods_once_and_the_second_strike_is_quarantine(
    api: Api, tiny: dict[str, Any], fake_nodes: Any, sick_agent: None
) -> None:
    fake_nodes(3)
    assert api.apply(_gpu_job(tiny)).returncode == 0
    until("the training pods", lambda: len(_trainers(api)) == 2, 60)
    (node, (pod, uid)), *_ = sorted(_trainers(api).items())
    (spare,) = {f"fake-{i}" for i in range(3)} - _trainers(api).keys()
    api.ok("cordon", spare)  # so that the pod returns to its node
    _fall_ill(api, pod)
    until("the node's condition", lambda: _condition(api, node).get("status") == "False", 30)
    assert _condition(api, node)["reason"] == "Xid79" and "GPU-a" in _condition(api, node)["message"]
    until("another pod", lambda: _trainers(api).get(node, ("", uid))[1] != uid, 60)
    assert not _tainted(api, node)
    events = api.ok("get", "events")
    assert "GpuSick" in events and "strike 1 of 2" in events
    _fall_ill(api, _trainers(api)[node][0])
    until("quarantine", lambda: _tainted(api, node), 30)
    api.ok("uncordon", spare)
    until("both pods run elsewhere", lambda: len(_trainers(api)) == 2 and node not in _trainers(api), 60)
    (line,) = api.get("grpo", "tiny-moe")["status"]["sickNodes"]
    assert line.startswith(f"node {node}: XID 79") and line.endswith("in quarantine")
    assert node in api.get("configmap", "grpo-gpu-health")["data"]
    api.ok("taint", "node", node, f"{TAINT}-")
    until("nothing is remembered", lambda: not api.get("configmap", "grpo-gpu-health").get("data"), 30)
    until("a good condition", lambda: _condition(api, node)["status"] == "True", 30)
