"""The requests by which nodes are patched and pods deleted, as an HTTP server receives them."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kubernetes.client import ApiClient, ApiException, Configuration

from grpo_operator.apply.writer import Writer
from grpo_operator.kuberay_client.kube import Kube

NODE = {"metadata": {"name": "n1", "resourceVersion": "7"}}


class _Server(ThreadingHTTPServer):
    """Records requests and answers all of them with ``status``."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[tuple[str, str, str, Any]] = []


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def _answer(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        path = self.path.split("?")[0]
        self.server.requests.append((self.command, path, self.headers["content-type"], body))
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(b'{"message": "no"}')

    def do_PATCH(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    made = _Server()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def _writer(server: _Server) -> Writer:
    return Writer(Kube(ApiClient(Configuration(host=f"http://127.0.0.1:{server.server_port}"))))


async def test_a_condition_is_merged_into_those_of_others(server: _Server) -> None:
    condition = {"type": "GRPOGPUHealthy", "status": "False"}
    await _writer(server).node_condition(NODE, condition)
    patch = {"metadata": {"name": "n1"}, "status": {"conditions": [condition]}}
    path, kind = "/api/v1/nodes/n1/status", "application/strategic-merge-patch+json"
    assert server.requests == [("PATCH", path, kind, patch)]


async def test_taints_are_replaced_only_on_the_node_that_was_read(server: _Server) -> None:
    taints = [{"key": "other", "effect": "NoSchedule"}]
    await _writer(server).node_taints(NODE, taints)
    ((method, path, kind, body),) = server.requests
    assert (method, path, kind) == ("PATCH", "/api/v1/nodes/n1", "application/merge-patch+json")
    assert body == {"metadata": {"name": "n1", "resourceVersion": "7"}, "spec": {"taints": taints}}
    server.status = 409
    with pytest.raises(ApiException):
        await _writer(server).node_taints(NODE, taints)


@pytest.mark.parametrize("status", [200, 404, 409])
async def test_a_pod_is_deleted_by_uid_so_that_its_successor_stays(server: _Server, status: int) -> None:
    server.status = status
    await _writer(server).delete_pod({"metadata": {"namespace": "default", "name": "a", "uid": "u1"}})
    ((method, path, _, body),) = server.requests
    assert (method, path) == ("DELETE", "/api/v1/namespaces/default/pods/a")
    assert body["preconditions"] == {"uid": "u1"} and "gracePeriodSeconds" not in body


async def test_a_pod_of_a_lost_node_is_deleted_without_its_kubelet(server: _Server) -> None:
    pod = {"metadata": {"namespace": "default", "name": "a", "uid": "u1"}}
    await _writer(server).delete_pod(pod, confirmed=False)
    ((_, _, _, body),) = server.requests
    assert body["gracePeriodSeconds"] == 0 and body["preconditions"] == {"uid": "u1"}
