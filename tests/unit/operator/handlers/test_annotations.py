"""Annotations of a job are changed in one write, unless the job has changed since it was read."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kubernetes import client

from grpo_operator.apply.writer import Writer
from grpo_operator.kuberay_client.kube import Kube
from support.objects import job


class ApiServer(ThreadingHTTPServer):
    """Applies merge patches to the metadata of one job. ``patches``: (path, content type) of each."""

    def __init__(self, meta: dict[str, Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.meta = meta
        self.patches: list[tuple[str, str]] = []

    def merge(self, patch: dict[str, Any]) -> int:
        if patch["metadata"]["resourceVersion"] != self.meta["resourceVersion"]:
            return 409
        merged = self.meta["annotations"] | patch["metadata"]["annotations"]
        self.meta["annotations"] = {name: value for name, value in merged.items() if value is not None}
        self.meta["resourceVersion"] = str(int(self.meta["resourceVersion"]) + 1)
        return 200


class _Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def do_PATCH(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        path = self.path.partition("?")[0]
        self.server.patches.append((path, self.headers["content-type"]))
        self.send_response(self.server.merge(body))
        self.end_headers()
        self.wfile.write(json.dumps({"metadata": self.server.meta}).encode())


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer({"resourceVersion": "5", "annotations": {"team": "rl", "asked": "torch"}}) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield running
        running.shutdown()


def _annotate(server: ApiServer, read: dict[str, Any], **change: str | None) -> bool:
    host = f"http://127.0.0.1:{server.server_address[1]}"
    writer = Writer(Kube(client.ApiClient(client.Configuration(host=host))))
    return asyncio.run(writer.annotate("grpojobs", read, change))


def _read(version: str) -> dict[str, Any]:
    manifest = job()
    manifest["metadata"] |= {"resourceVersion": version, "annotations": {"team": "rl", "asked": "torch"}}
    return manifest


def test_a_change_replaces_one_annotation_by_another(server: ApiServer) -> None:
    read = _read("5")
    assert _annotate(server, read, asked=None, accepted="a")
    assert server.meta["annotations"] == {"team": "rl", "accepted": "a"}
    assert read["metadata"]["annotations"] == server.meta["annotations"]
    assert read["metadata"]["resourceVersion"] == "6", "the status is written to the changed job"
    path = "/apis/rl.grpo.dev/v1alpha1/namespaces/default/grpojobs/tiny-moe"
    assert server.patches == [(path, "application/merge-patch+json")]


def test_a_job_that_has_changed_since_is_left_alone(server: ApiServer) -> None:
    read = _read("4")
    assert not _annotate(server, read, asked=None)
    assert server.meta["annotations"]["asked"] == "torch"
    assert read["metadata"]["resourceVersion"] == "4"
