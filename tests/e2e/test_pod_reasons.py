"""A job's status names why its pods do not run, as soon as kubelet or scheduler know it."""

import os
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from grpo_devcluster.follow import JobView
from grpo_devcluster.results import record_from_test
from support.jobs import Start

pytestmark = pytest.mark.slow  # jobs that cannot run, one after the other: four minutes
# Seconds from the moment at which kubelet or scheduler say it, or from the job's creation if they never do.
LIMIT, PROMISED = 90.0, 30.0
STARTED = 300.0  # seconds until the container has failed: an engine imports much before it reads arguments
Spec = dict[str, Any]


def _image(spec: Spec) -> None:
    spec["image"] = "registry.invalid/team/trainer:1"


def _claim(spec: Spec) -> None:
    spec["checkpoint"]["store"] = {"pvc": "no-claim"}


def _node(spec: Spec) -> None:
    spec["trainer"]["nodeSelector"] = {"disk": "none"}


def _secret(spec: Spec) -> None:
    source = {"secretKeyRef": {"name": "no-secret", "key": "token"}}
    _overlay(spec, {"env": [{"name": "TOKEN", "valueFrom": source}]})


def _memory(spec: Spec) -> None:
    # An engine allocates more than this while it imports. A limit that is met by files alone, as Ray's
    # processes would have with less, makes the kernel read them again and again.
    little = {"requests": {"memory": "192Mi"}, "limits": {"memory": "192Mi"}}
    container = {"name": "engine", "resources": little}
    spec["rollout"]["template"]["podTemplate"] = {"spec": {"containers": [container]}}


def _argument(spec: Spec) -> None:
    spec["rollout"]["template"]["engine"]["extraArgs"] = ["--no-such-argument"]


def _overlay(spec: Spec, container: dict[str, Any]) -> None:
    container = {"name": "ray-worker"} | container
    spec["trainer"]["podTemplate"] = {"spec": {"containers": [container]}}


REASONS: dict[str, tuple[Callable[[Spec], None], str]] = {
    "image": (_image, r"(ErrImagePull|ImagePullBackOff).*registry\.invalid"),
    "claim": (_claim, r"no-claim.* not found"),
    "node": (_node, r"didn't match Pod's node affinity/selector|0 have the labels of nodeSelector"),
    "secret": (_secret, r'CreateContainerConfigError.*secret "no-secret" not found'),
    "memory": (_memory, r"OOMKilled"),
    "argument": (_argument, r"unrecognized arguments: --no-such-argument"),
}


def test_reasons_of_pods_are_named_in_time(start: Start) -> None:
    seconds = {name: _named(start, name, change, wanted) for name, (change, wanted) in REASONS.items()}
    print(seconds, flush=True)
    named = [value for value in seconds.values() if value <= LIMIT]
    slowest = max(seconds.values())
    assert len(named) == len(REASONS), seconds
    record_from_test(
        "experience",
        {
            "pod_reasons_named": len(named),
            "pod_reasons_named_of": len(REASONS),
            "seconds_to_reason_max": round(slowest, 1),
        },
    )
    if os.environ.get("GRPO_RECORD") == "1":
        assert slowest <= PROMISED, f"{seconds}: record it on a quiet machine, or correct what is promised"


def _named(start: Start, name: str, change: Callable[[Spec], None], wanted: str) -> float:
    """Return the seconds until a job's status says what is ``wanted``; infinite after the limits."""
    job, began = start(f"reason-{name}", change=change), time.monotonic()
    known: float | None = None
    try:
        while not re.search(wanted, _said(job)):
            now = time.monotonic()
            if known is None and re.search(wanted, _pods_say(job)):
                known = now
            if now - began > STARTED or (known is not None and now - known > LIMIT):
                print(name, _said(job), flush=True)
                return float("inf")
            time.sleep(0.2)
        seconds = time.monotonic() - (began if known is None else known)
        # The column REASON of kubectl get has a word for it.
        assert job.status().get("reason"), job.status()
        return seconds
    finally:
        job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")


def _pods_say(job: JobView) -> str:
    """Return the reasons and messages of the job's pods and of their containers, in lines."""
    found: list[str] = []
    for pod in job.pods():
        status = pod["status"]
        states = status.get("initContainerStatuses", []) + status.get("containerStatuses", [])
        inner = [
            each for one in states for key in ("state", "lastState") for each in one.get(key, {}).values()
        ]
        parts = (*status.get("conditions", []), *inner)
        found += [f"{part.get('reason', '')}: {part.get('message', '')}" for part in parts]
    return "\n".join(found)


def _said(job: JobView) -> str:
    return "\n".join(condition["message"] for condition in job.status().get("conditions", ()))
