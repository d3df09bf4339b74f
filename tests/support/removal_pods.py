"""The pod that removes the folder of a deleted job. On KWOK's nodes it runs nothing: tests play its end."""

import json
from typing import Any

from support.api_server import POOL, Api, until

SELECTOR = f"{POOL}=store-removal"


def policy(api: Api, job: str, value: str, namespace: str = "default") -> None:
    """Set ``checkpoint.deletionPolicy`` of a job."""
    patch = json.dumps({"spec": {"checkpoint": {"deletionPolicy": value}}})
    api.ok("patch", "grpojob", job, "-n", namespace, "--type=merge", "-p", patch)


def removers(api: Api) -> list[dict[str, Any]]:
    """Return the pods that remove folders, and are not being deleted."""
    found = api.get("pods", "-l", SELECTOR)["items"]
    return [pod for pod in found if not pod["metadata"].get("deletionTimestamp")]


def remover(api: Api, other_than: str = "", timeout: float = 60) -> dict[str, Any]:
    """Wait for the pod of a job. ``other_than``: uid of one before."""

    def found() -> dict[str, Any] | None:
        return next((pod for pod in removers(api) if pod["metadata"]["uid"] != other_than), None)

    return dict(until("a pod that removes the folder", found, timeout))


def end(api: Api, pod: dict[str, Any], phase: str = "Succeeded") -> None:
    """Let the pod end."""
    _patch(api, pod, {"phase": phase})


def crash(api: Api, pod: dict[str, Any], message: str) -> None:
    """Let its process have failed; kubelet would start it again after a pause."""
    container = {
        "name": "controller", "image": "x", "imageID": "x", "ready": False, "started": False,
        "restartCount": 2,
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
        "lastState": {"terminated": {"exitCode": 1, "reason": "Error", "message": message}},
    }  # fmt: skip
    _patch(api, pod, {"phase": "Running", "containerStatuses": [container]})


def _patch(api: Api, pod: dict[str, Any], status: dict[str, Any]) -> None:
    given = ("--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
    api.ok("patch", "pod", pod["metadata"]["name"], *given)
