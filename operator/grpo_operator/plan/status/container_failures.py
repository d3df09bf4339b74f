"""Failing containers and their errors (pure)."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from grpo_operator.api.errors import last_error_line

# Reasons that kubelet gives for a waiting container when the container cannot start.
_WAITING_FAILURES = frozenset(
    {
        "CrashLoopBackOff", "CreateContainerConfigError", "CreateContainerError", "ErrImageNeverPull",
        "ErrImagePull", "ImageInspectError", "ImagePullBackOff", "InvalidImageName", "RunContainerError",
    }
)  # fmt: skip


class ContainerFailure(NamedTuple):
    """A failing container. ``error``: the last error line of the container, or of kubelet."""

    pod: str
    container: str
    restarts: int
    reason: str
    error: str

    @property
    def text(self) -> str:
        """Return the failure as one line for a condition message."""
        again = f" after {self.restarts} restarts" if self.restarts > 1 else ""
        return f"{self.pod}, container {self.container}: {self.reason}{again}: {self.error}".removesuffix(
            ": "
        )


def failing(status: dict[str, Any]) -> list[dict[str, Any]]:
    """Return name, restarts, reason and error of each failed container in a pod's status."""
    containers = (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])
    return [entry for entry in map(_failure, containers) if entry]


def container_failures(pods: Iterable[dict[str, Any]]) -> list[ContainerFailure]:
    """Return the failing containers of pods, as the cache keeps them under ``status.failing``."""
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
        return None  # it has started: an earlier exit no longer matters
    waiting = state.get("waiting") or {}
    ended = next((end for end in (state.get("terminated"), last.get("terminated")) if end), None)
    ended = ended if ended and ended.get("exitCode") else None
    cannot_start = waiting.get("reason") in _WAITING_FAILURES
    if not cannot_start and ended is None:
        return None
    output = (ended or {}).get("message") or (waiting.get("message", "") if cannot_start else "")
    reason = (ended or {}).get("reason") or waiting.get("reason", "")
    return {
        "name": container["name"],
        "restarts": int(container.get("restartCount", 0)),
        "reason": f"{reason}, exit code {ended['exitCode']}" if ended else reason,
        "error": last_error_line(output),
    }
