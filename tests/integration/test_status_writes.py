"""Status is written only if it was computed from the newest object."""

import asyncio
import json
from typing import Any

import pytest
from kubernetes import config

from grpo_devcluster.paths import KUBECONFIG
from grpo_operator.api.base import API_VERSION
from grpo_operator.api.v1alpha1.status import GRPOJobStatus
from grpo_operator.apply.writer import Writer
from grpo_operator.kuberay_client.kube import Kube
from support.api_server import Api


@pytest.fixture(scope="module", autouse=True)
def operator() -> None:
    """This test writes in the operator's place."""


def test_a_stale_read_never_replaces_a_newer_status(api: Api, tiny: dict[str, Any]) -> None:
    writer = Writer(Kube(config.new_client_from_config(str(KUBECONFIG))))
    assert api.apply(tiny).returncode == 0
    old = api.get("grpo", "tiny-moe")
    ended = json.dumps({"status": {"phase": "Succeeded", "step": 7}})
    api.ok("patch", "grpo", "tiny-moe", "--subresource=status", "--type=merge", "-p", ended)
    starting = GRPOJobStatus.model_validate({"phase": "Starting", "step": 0})
    assert not asyncio.run(writer.status("grpojobs", old, starting))
    status = api.get("grpo", "tiny-moe")["status"]
    assert (status["phase"], status["step"]) == ("Succeeded", 7)
    new = api.get("grpo", "tiny-moe")
    assert asyncio.run(writer.status("grpojobs", new, starting))
    assert api.get("grpo", "tiny-moe")["status"]["phase"] == "Starting"


def test_a_message_may_have_any_character(api: Api, tiny: dict[str, Any]) -> None:
    """Messages quote what containers print, and the API server reads an apply as YAML."""
    assert api.apply(tiny).returncode == 0
    few = "\ufeff\ufffe\uffff\U0001f680\U0010ffff \\ud83d \\\\u0000"
    for message in (
        "".join(map(chr, range(1, 0x800))),
        "".join(map(chr, range(0x2000, 0x3000))),
        few,
        "\ud83d",
    ):
        assert _written(api, message) == message.replace("\ud83d", "\ufffd")


def _written(api: Api, message: str) -> str:
    """Apply a status with this message and return the message that the API server has then."""
    metadata = {key: api.get("grpo", "tiny-moe")["metadata"][key] for key in ("name", "namespace")}
    condition = {"type": "Ready", "status": "True", "reason": "Any", "message": message}
    status = {"conditions": [condition | {"lastTransitionTime": "2026-01-01T00:00:00Z"}]}
    manifest = {"apiVersion": API_VERSION, "kind": "GRPOJob", "metadata": metadata, "status": status}
    kube = Kube(config.new_client_from_config(str(KUBECONFIG)))
    asyncio.run(kube.apply(f"apis/{API_VERSION}", "grpojobs", manifest, "/status"))
    (found,) = api.get("grpo", "tiny-moe")["status"]["conditions"]
    return str(found["message"])
