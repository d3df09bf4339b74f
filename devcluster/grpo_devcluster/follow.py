"""Follows a GRPOJob live through kubectl."""

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_devcluster.addons import kubectl
from grpo_devcluster.paths import JOB_DATA

JOB_LABEL, POOL_LABEL = "rl.grpo.dev/job", "rl.grpo.dev/pool"


@dataclass(slots=True)
class JobView:
    """One job of one cluster. ``peak_used``: highest memory use in bytes that ``wait`` measured."""

    kubeconfig: Path
    name: str
    namespace: str = "default"
    peak_used: int = field(default=0)

    def get(self) -> dict[str, Any]:
        """Return the GRPOJob object."""
        text = self.kubectl("get", "grpojob", self.name, "-o", "json")
        data: dict[str, Any] = json.loads(text)
        return data

    def store(self) -> Path:
        """Return the devcluster's folder of the job's checkpoints and metrics on this machine."""
        return JOB_DATA / f"{self.namespace}-{self.name}-{self.get()['metadata']['uid'][:8]}"

    def status(self) -> dict[str, Any]:
        return dict(self.get().get("status") or {})

    def pool(self) -> dict[str, Any]:
        """Return the status of the job's RolloutPool."""
        text = self.kubectl("get", "rolloutpool", f"{self.name}-rollout", "-o", "json")
        return dict(json.loads(text).get("status") or {})

    def pods(self, pool: str = "") -> list[dict[str, Any]]:
        """Return the pods of the job, or of one of its pools."""
        selector = f"{JOB_LABEL}={self.name}" + (f",{POOL_LABEL}={pool}" if pool else "")
        pods = json.loads(self.kubectl("get", "pods", "-l", selector, "-o", "json"))
        return list(pods["items"])

    def kubectl(self, *arguments: str) -> str:
        return kubectl("-n", self.namespace, *arguments, kubeconfig=self.kubeconfig)

    def exec(self, pod: str, container: str, *command: str) -> str:
        """Run a command in a container and return its output."""
        return self.kubectl("exec", pod, "-c", container, "--", *command)

    def wait(self, done: frozenset[str], timeout: float, verbose: bool = True) -> dict[str, Any]:
        """Wait until the phase is one of ``done`` and return the status; print a line for each change.

        ``timeout``: seconds without a change. Raises TimeoutError with the last status.
        """
        deadline, last = 0.0, ""
        while True:
            status = self.status()
            line = _line(status)
            if line != last:
                deadline, last = time.monotonic() + timeout, line
                if verbose:
                    print(f"    {line}", flush=True)
            if status.get("phase") in done:
                return status
            if time.monotonic() > deadline:
                why = f"nothing changed for {timeout:.0f} s"
                raise TimeoutError(f"{self.name} is not {sorted(done)}, and {why}: {line}")
            self.peak_used = max(self.peak_used, memory_used())
            time.sleep(2)


def _line(status: dict[str, Any]) -> str:
    parts = [f"{status.get('phase', 'Pending'):<11}", f"step {status.get('progress', '-'):<7}"]
    parts.append(f"weights {status.get('weights', '-'):<4}")
    parts.append(f"reward {status.get('rewardMean', '-'):<6}")
    parts.append(f"tokens/s/rank {status.get('tokensPerSecondPerGpu', '-'):<7}")
    parts.append(f"train {status.get('trainReady', '-')} rollout {status.get('rolloutReady', '-')}")
    return " ".join(parts)


def memory_used() -> int:
    """Return the bytes of memory in use on this machine, without the page cache."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line
    )
    kilobytes = {name: int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable")}
    return (kilobytes["MemTotal"] - kilobytes["MemAvailable"]) * 1024
