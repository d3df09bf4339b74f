"""kubectl and the operator's process for tests against a real API server."""

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from grpo_devcluster.gobuild import binary
from grpo_devcluster.operator_process import operator_process
from grpo_devcluster.paths import KUBECONFIG


class Api:
    """kubectl against the test's API server."""

    def run(self, *arguments: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(binary("kubectl")), f"--kubeconfig={KUBECONFIG}", *arguments]
        return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False)

    def ok(self, *arguments: str, stdin: str | None = None) -> str:
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def get(self, *arguments: str) -> dict[str, Any]:
        return dict(json.loads(self.ok("get", *arguments, "-o", "json")))

    def exists(self, kind: str, name: str) -> bool:
        return self.run("get", kind, name).returncode == 0

    def apply(self, manifest: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        return self.run("apply", "-f", "-", stdin=yaml.safe_dump(manifest))


class Operator:
    """The operator's process, which a test may replace."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        self.process = stack.enter_context(operator_process(directory))

    def restart(self, **changes: object) -> None:
        """Start another one; ``changes``: to the settings."""
        self.process.terminate()
        self.process.wait(20)
        self.process = self._stack.enter_context(operator_process(self._directory, changes=changes))


def until(what: str, check: Callable[[], Any], timeout: float = 30) -> Any:
    """Poll until ``check`` is true and return its value. Raises AssertionError with ``what``."""
    deadline = time.monotonic() + timeout
    while not (value := check()):
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s: {what}"
        time.sleep(0.2)
    return value


POOL = "rl.grpo.dev/pool"


WHOLE = Counter({"head": 1, "controller": 1, "trainer": 2, "rollout": 2})


def running(api: Api) -> Counter[str]:
    """Return the number of running pods of each pool."""
    items = api.get("pods")["items"]
    return Counter(p["metadata"]["labels"][POOL] for p in items if p["status"].get("phase") == "Running")


def stalled(api: Api, name: str, kind: str = "grpojob") -> dict[str, str]:
    """Return the condition Stalled while it is true, else {}."""
    conditions = api.get(kind, name).get("status", {}).get("conditions", [])
    found = (c for c in conditions if c["type"] == "Stalled" and c["status"] == "True")
    return next(found, {})


def lose_controller(api: Api, job: str) -> None:
    """Leave the job without a running controller.

    A controller on a KWOK node answers no request, so a suspended job would wait for its checkpoint and
    never end. Without a controller there is nothing to wait for.
    """
    nodes = api.ok("get", "nodes", "-o", "name").split()
    api.ok("cordon", *(node.removeprefix("node/") for node in nodes))
    api.ok("delete", "pod", "-l", f"rl.grpo.dev/job={job},{POOL}=controller")
