"""Containers that do not run as they should, and why (pure)."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from grpo_operator.api.errors import last_error_line

# Reasons of kubelet for a container that waits because something is wrong.
_WRONG = frozenset(
    {
        "CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull",
        "ErrImagePull", "ImageInspectError", "ImagePullBackOff", "InvalidImageName", "RunContainerError",
    }
)  # fmt: skip


class ContainerFailure(NamedTuple):
    """A container that fails. ``error``: the last line that it, or kubelet, has said."""

    pod: str
    container: str
    restarts: int
    reason: str
    error: str

    @property
    def text(self) -> str:
        again = f" after {self.restarts} restarts" if self.restarts > 1 else ""
        return f"{self.pod}, container {self.container}: {self.reason}{again}: {self.error}".removesuffix(
            ": "
        )


def failing(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Name, restarts, reason and error of each container in a pod's status that failed."""
    every = (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])
    return [entry for entry in map(_failure, every) if entry]


def container_failures(pods: Iterable[dict[str, Any]]) -> list[ContainerFailure]:
    """Failing containers of pods that are not ready."""
    return [
        ContainerFailure(
            pod["metadata"]["name"], entry["name"], entry["restarts"], entry["reason"], entry["error"]
        )
        for pod in pods
        for entry in pod.get("status", {}).get("failing") or []
    ]


def _failure(container: dict[str, Any]) -> dict[str, Any] | None:
    if container.get("ready"):
        return None
    state, last = container.get("state") or {}, container.get("lastState") or {}
    if "running" in state and container.get("started"):
        return None  # it has come up: how it ended once is no reason any more
    waiting = state.get("waiting") or {}
    ended = next((end for end in (state.get("terminated"), last.get("terminated")) if end), None)
    ended = ended if ended and ended.get("exitCode") else None
    wrong = waiting.get("reason") in _WRONG
    if not wrong and ended is None:
        return None
    said = (ended or {}).get("message") or (waiting.get("message", "") if wrong else "")
    reason = (ended or {}).get("reason") or waiting.get("reason", "")
    return {
        "name": container["name"],
        "restarts": int(container.get("restartCount", 0)),
        "reason": f"{reason}, exit code {ended['exitCode']}" if ended else reason,
        "error": last_error_line(said),
    }
