"""A stand-in for the agent of a node with a sick GPU, and the job whose pods it moves, on KWOK nodes."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from grpo_operator.api.names import AGENT_PORT
from support.api_server import POOL, Api

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


@contextmanager
def serving_sick_agent() -> Iterator[None]:
    """Answer for every pod whose address is 127.0.0.1."""
    server = ThreadingHTTPServer(("127.0.0.1", AGENT_PORT), _Agent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield
    server.shutdown()
    server.server_close()


def gpu_job(tiny: dict[str, Any]) -> dict[str, Any]:
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


def trainers(api: Api) -> dict[str, tuple[str, str]]:
    """Return node -> name and UID of its running training pod."""
    return {
        p["spec"]["nodeName"]: (p["metadata"]["name"], p["metadata"]["uid"])
        for p in api.get("pods", "-l", TRAINERS)["items"]
        if p["status"]["phase"] == "Running" and not p["metadata"].get("deletionTimestamp")
    }


def fall_ill(api: Api, pod: str) -> None:
    """Give a KWOK pod the address of the agent that reports a sick GPU."""
    status = {"status": {"podIP": "127.0.0.1", "podIPs": [{"ip": "127.0.0.1"}]}}
    api.ok("patch", "pod", pod, "--subresource=status", "--type=merge", "-p", json.dumps(status))
