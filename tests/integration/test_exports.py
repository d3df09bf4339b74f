"""Exports by annotation, with a real API server: one pod for each request, its end in the status.

On KWOK's nodes the pod runs nothing: tests play its end.
"""

import json
from typing import Any

from support.api_server import POOL, WHOLE, Api, Operator, running, until

SELECTOR = f"{POOL}=export"


def _ask(api: Api, request: str) -> None:
    api.ok("annotate", "grpojob", "tiny-moe", "--overwrite", f"rl.grpo.dev/export={request}")


def _export(api: Api) -> dict[str, Any]:
    return dict((api.get("grpojob", "tiny-moe").get("status") or {}).get("export") or {})


def _pods(api: Api) -> list[dict[str, Any]]:
    found = api.get("pods", "-l", SELECTOR)["items"]
    return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]


def _status(api: Api, kind: str, name: str, status: dict[str, Any]) -> None:
    given = ("--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
    api.ok("patch", kind, name, *given)


def _pod(api: Api, other_than: str = "") -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        return next((pod for pod in _pods(api) if pod["metadata"]["uid"] != other_than), None)

    return dict(until("a pod that exports", found, 60))


def test_each_request_gets_one_pod_and_its_end(
    api: Api, tiny: dict[str, Any], fake_nodes: Any, operator: Operator
) -> None:
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    _ask(api, "at=1")
    until("the refusal", lambda: _export(api).get("state") == "Failed")
    assert "no complete checkpoint" in _export(api)["message"] and not _pods(api)
    checkpoint = {"step": 20, "location": "/store/x", "complete": True}
    _status(api, "grpojob", "tiny-moe", {"lastCheckpoint": checkpoint})
    _ask(api, "step=10 quantization=fp8-block128")
    pod = _pod(api)
    assert '"step": 10' in pod["spec"]["containers"][0]["args"][0]
    operator.restart()
    until("its state", lambda: _export(api)["state"] == "Running")
    _status(api, "pod", pod["metadata"]["name"], {"phase": "Succeeded"})
    until("the end", lambda: _export(api)["state"] == "Written")
    assert _export(api)["path"].endswith("/export/checkpoint-10-fp8-block128")
    until("its pod is gone", lambda: not _pods(api), 60)
    assert "checkpoint-10-fp8-block128" in api.ok(
        "get", "events", "--field-selector=reason=ExportWritten", "-o", "jsonpath={.items[*].message}"
    )
    assert running(api) == WHOLE, "the job goes on"


def test_an_export_does_not_outlive_a_job_whose_folder_is_removed(
    api: Api, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(2)
    tiny["spec"]["checkpoint"]["deletionPolicy"] = "Delete"
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    checkpoint = {"step": 20, "location": "/store/x", "complete": True}
    _status(api, "grpojob", "tiny-moe", {"lastCheckpoint": checkpoint})
    _ask(api, "step=20")
    _pod(api)
    api.ok("delete", "grpojob", "tiny-moe", "--wait=false")
    until("the export has ended", lambda: not _pods(api), 60)
    remover = until("a remover", lambda: api.get("pods", "-l", f"{POOL}=store-removal")["items"], 60)
    _status(api, "pod", remover[0]["metadata"]["name"], {"phase": "Succeeded"})
    until("the job is gone", lambda: not api.exists("grpojob", "tiny-moe"), 60)
