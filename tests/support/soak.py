"""Random faults on the pods of a running job, drawn by a seed; each one is proved to have happened."""

import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from grpo_devcluster.addons import kubectl
from grpo_devcluster.follow import JobView
from grpo_devcluster.install import NAMESPACE
from support.faults import kill_container, kill_process, report, step_of, until, wait_step

SHARE = 0.1  # of the steps have a fault
RECOVERED = 900.0  # seconds from the last fault until a step that was never finished before is finished
GPUS = 4  # two ranks and two engines, of which each counts as one
_OPERATOR = "app.kubernetes.io/name=grpo-operator"
# Kind of fault -> pool and container whose first process gets SIGKILL.
_CONTAINERS = {
    "trainer pod": ("trainer", "ray-worker"),
    "engine": ("rollout", "engine"),
    "controller": ("controller", "controller"),
    "agent of a trainer": ("trainer", "agent"),
    "agent of an engine": ("rollout", "agent"),
    "ray head": ("head", "ray-head"),
}
KINDS = (*_CONTAINERS, "rank", "operator")


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that has happened. ``step``: that the job was at."""

    kind: str
    victim: str
    step: int


@dataclass
class Soak:
    """Faults of a job. ``missed``: kinds that were drawn while nothing of the kind ran."""

    job: JobView
    seed: int
    kinds: tuple[str, ...] = KINDS
    faults: list[Fault] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._draws, self._random = random.Random(self.seed), random.Random(self.seed + 1)
        self._rest: list[str] = []  # of the kinds, until each has had its turn

    def run(self, seconds: float) -> None:
        """Inject faults for so long, at most one in each step, in steps that are drawn."""
        deadline, furthest = time.monotonic() + seconds, step_of(self.job)
        while time.monotonic() < deadline:
            step = step_of(self.job)
            drawn = [self._draws.random() < SHARE for _ in range(furthest, step)]
            if any(drawn):
                self.inject(step)
            furthest = max(furthest, step)
            time.sleep(0.2)

    def wait_for_new_step(self) -> int:
        """Wait for a step that was never finished before, when no more faults come; return the one before."""
        last = until("the furthest step", lambda: max(step_of(self.job), 0), RECOVERED)
        wait_step(self.job, last + 1, RECOVERED)
        return int(last)

    def inject(self, step: int) -> None:
        """Inject the next fault; return after it has happened."""
        if not self._rest:
            self._rest = self._random.sample(self.kinds, len(self.kinds))
        kind = self._rest.pop()
        victim = self._victims(kind)
        if victim is None:
            self.missed.append(kind)
            return
        name = victim()
        self.faults.append(Fault(kind, name, step))
        print(f"    step {step}: {kind} {name}", flush=True)

    def counts(self) -> Counter[str]:
        """Return the number of faults by kind."""
        return Counter(fault.kind for fault in self.faults)

    def _victims(self, kind: str) -> Callable[[], str] | None:
        """Return what kills one of the kind; None: nothing of it runs."""
        if kind == "rank":
            return self._rank()
        if kind == "operator":
            pods = json.loads(
                kubectl(
                    "-n",
                    NAMESPACE,
                    "get",
                    "pods",
                    "-l",
                    _OPERATOR,
                    "-o",
                    "json",
                    kubeconfig=self.job.kubeconfig,
                )
            )["items"]
            container = "operator"
        else:
            pool, container = _CONTAINERS[kind]
            pods = self.job.pods(pool)
        running = [pod for pod in pods if _runs(pod, container)]
        if not running:
            return None
        pod = self._random.choice(running)

        def kill() -> str:
            kill_container(pod, container)
            return str(pod["metadata"]["name"])

        return kill

    def _rank(self) -> Callable[[], str] | None:
        """Kill the process of a rank in its pod, as the status names it."""
        try:
            ranks = report(self.job)["trainers"]
        except (LookupError, ValueError):
            return None
        if not ranks:
            return None
        rank = self._random.choice(ranks)
        pods = [pod for pod in self.job.pods("trainer") if pod["status"].get("podIP") == rank["address"]]
        if not pods or not _runs(pods[0], "ray-worker"):
            return None
        name = pods[0]["metadata"]["name"]

        def kill() -> str:
            kill_process(self.job, name, rank["pid"])
            return f"{rank['rank']} in {name}"

        return kill


def gpu_seconds(job: JobView) -> dict[str, float]:
    """Return the seconds of all GPUs that the job has accounted for, by use."""
    return dict(until("a report", lambda: report(job)["gpuSeconds"], 60))


def _runs(pod: dict[str, Any], container: str) -> bool:
    status = pod["status"]
    states = status.get("containerStatuses", []) + status.get("initContainerStatuses", [])
    deleted = "deletionTimestamp" in pod["metadata"]
    return not deleted and any(s["name"] == container and "running" in s["state"] for s in states)
