"""Faults for the end-to-end tests; each function returns only after the fault has happened."""

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from grpo_devcluster.follow import JobView
from grpo_devcluster.install import NAMESPACE
from grpo_devcluster.node import ctr

AGENT_PORT, CONTROLLER_PORT = 9000, 8090
NEXT_STEP = 600  # seconds for any step, the first one of a job on a slow machine too


def until(what: str, check: Callable[[], Any], timeout: float, every: float = 0.5) -> Any:
    """Poll until ``check`` is true and return its value. Raises AssertionError with ``what``.

    A pod that does not answer or does not exist counts as "not yet".
    """
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(httpx.HTTPError, LookupError, ValueError):
            value = check()
            if value:
                return value
        assert time.monotonic() < deadline, f"not within {timeout:.0f} s: {what}"
        time.sleep(every)


def uids(job: JobView, *pools: str) -> dict[str, str]:
    """Return name -> UID of the job's pods, of some pools or of all."""
    pods = [pod for pool in pools or ("",) for pod in job.pods(pool)]
    return {p["metadata"]["name"]: p["metadata"]["uid"] for p in pods}


def report(job: JobView) -> dict[str, Any]:
    """Return the controller's status, read directly from its pod."""
    (pod,) = job.pods("controller")
    url = f"http://{pod['status']['podIP']}:{CONTROLLER_PORT}/v1/status"
    return dict(httpx.get(url, timeout=5).json())


def step_of(job: JobView) -> int:
    """Return the completed steps, or -1 while the controller does not answer."""
    try:
        return int(report(job)["step"])
    except (httpx.HTTPError, ValueError, KeyError):
        return -1


def wait_step(job: JobView, step: int, timeout: float | None = None) -> None:
    """Wait until a step is completed. ``timeout``: seconds; None: as long as steps follow each other."""
    if timeout is not None:
        until(f"step {step}", lambda: step_of(job) >= step, timeout, every=0.2)
        return
    done, deadline = step_of(job), time.monotonic() + NEXT_STEP
    while done < step:
        assert time.monotonic() < deadline, f"not within {NEXT_STEP} s: a step after {done}"
        time.sleep(0.2)
        before, done = done, step_of(job)
        if done > before:
            deadline = time.monotonic() + NEXT_STEP


def agent(pod: dict[str, Any]) -> dict[str, Any]:
    """Return the status of a rollout pod's agent, or {} while it does not answer."""
    try:
        return dict(httpx.get(f"http://{pod['status']['podIP']}:{AGENT_PORT}/v1/status", timeout=2).json())
    except (httpx.HTTPError, ValueError, KeyError):
        return {}


def main_process(pod: dict[str, Any], container: str) -> int:
    """Return the host process id of a container's first process."""
    states = pod["status"]["containerStatuses"] + pod["status"].get("initContainerStatuses", [])
    (container_id,) = [
        s["containerID"].removeprefix("containerd://") for s in states if s["name"] == container
    ]
    for line in ctr("tasks", "list")[1].splitlines()[1:]:
        name, pid, _ = line.split()
        if name == container_id:
            return int(pid)
    raise AssertionError(f"container {container} of {pod['metadata']['name']} has no task")


def kill_container(pod: dict[str, Any], container: str) -> None:
    """SIGKILL the container's first process; the kernel then ends its whole PID namespace."""
    pid = main_process(pod, container)
    os.kill(pid, signal.SIGKILL)
    until(f"process {pid} is gone", lambda: not Path(f"/proc/{pid}").exists(), 10, every=0.05)


def started(pod: dict[str, Any], container: str) -> str:
    """Return UID and start of a container, which tell its runs apart."""
    (state,) = [s for s in pod["status"]["containerStatuses"] if s["name"] == container]
    return f"{pod['metadata']['uid']} {state['state'].get('running', {}).get('startedAt')}"


def kill_rank(job: JobView, number: int = 1) -> None:
    """SIGKILL the process of a rank, as the controller names it; its pod lives on."""
    kill_process(job, *_process(job, number))


def stop_rank(job: JobView, number: int) -> None:
    """SIGSTOP the process of a rank, as the controller names it."""
    pod, pid = _process(job, number)
    job.exec(pod, "ray-worker", "kill", "-STOP", str(pid))


def _process(job: JobView, number: int) -> tuple[str, int]:
    """Return the pod of a rank, and the process in it."""
    rank = report(job)["trainers"][number]
    (pod,) = [p for p in job.pods("trainer") if p["status"]["podIP"] == rank["address"]]
    return str(pod["metadata"]["name"]), int(rank["pid"])


def kill_process(job: JobView, pod: str, pid: int) -> None:
    """SIGKILL a process in the container of a training pod's ranks, and see that it has ended."""
    job.exec(pod, "ray-worker", "kill", "-9", str(pid))
    look = f"cat /proc/{pid}/stat 2>/dev/null || echo ') gone'"

    def ended() -> bool:
        state = job.exec(pod, "ray-worker", "sh", "-c", look).rsplit(")", 1)[1].split()[0]
        return state in ("gone", "Z", "X")  # Ray may take a while to reap it

    until(f"process {pid} in {pod} is gone", ended, 10, every=0.2)


def kill_during_sync(pod: dict[str, Any], pid: int, timeout: float = 120) -> None:
    """SIGKILL a process while the agent of the engine ``pod`` is loading weights.

    An update takes a tenth of a second; the agent's log, as kubelet keeps it, shows at once that one begins.
    """
    deadline = time.monotonic() + timeout
    meta = pod["metadata"]
    folder = Path("/var/log/pods") / f"{meta['namespace']}_{meta['name']}_{meta['uid']}" / "agent"
    newest = max(folder.glob("*.log"), key=lambda file: int(file.stem))
    with newest.open() as log:
        log.seek(0, os.SEEK_END)
        while ": prepare" not in log.readline():
            assert time.monotonic() < deadline, "no sync was seen"
            time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def slowed(pod: dict[str, Any], rate: str) -> Iterator[None]:
    """Limit a pod's outgoing traffic to ``rate`` (tc syntax); check that packets were delayed."""
    inside = ["nsenter", "-t", str(main_process(pod, "agent")), "-n", "tc"]
    shape = ["qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "16kb", "latency", "2s"]
    subprocess.run([*inside, *shape], check=True)
    try:
        yield
        command = [*inside, "-s", "qdisc", "show", "dev", "eth0"]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        held = re.search(r"overlimits (\d+)", shown)
        assert held and int(held[1]), f"no packet had to wait: {shown}"
    finally:
        subprocess.run([*inside, "qdisc", "delete", "dev", "eth0", "root"], check=True)


DROP, RESET = ("DROP",), ("REJECT", "--reject-with", "tcp-reset")


@contextlib.contextmanager
def cut_off(
    pod: dict[str, Any], others: list[dict[str, Any]], verdict: Sequence[str] = DROP
) -> Iterator[None]:
    """Let no packet pass between a pod and others; check that some were held up.

    ``verdict``: DROP leaves connections open; RESET ends them, and both ends notice at once.
    """
    # The engine itself may be killed while the rules are in place.
    inside = ["nsenter", "-t", str(main_process(pod, "agent")), "-n", "iptables"]
    # The resets themselves must pass, or the other end would not notice.
    but = ["-p", "tcp", "!", "--tcp-flags", "RST", "RST"] if verdict == RESET else []
    ways = [("INPUT", "-s"), ("OUTPUT", "-d")]
    rules = [
        [chain, flag, other["status"]["podIP"], *but, "-j", *verdict]
        for chain, flag in ways
        for other in others
    ]
    for rule in rules:
        subprocess.run([*inside, "-I", *rule], check=True)
    try:
        yield
        shown = subprocess.run([*inside, "-nvxL"], check=True, capture_output=True, text=True).stdout
        lost = [int(line.split()[0]) for line in shown.splitlines() if f" {verdict[0]} " in line]
        assert sum(lost), f"no packet was lost: {shown}"
    finally:
        for rule in rules:
            subprocess.run([*inside, "-D", *rule], check=True)


def scale_operator(job: JobView, replicas: int) -> None:
    """Give the operator so many pods; return when they run, or when its pods are gone."""
    job.kubectl("-n", NAMESPACE, "scale", "deployment", "grpo-operator", f"--replicas={replicas}")
    if replicas:
        job.kubectl("-n", NAMESPACE, "rollout", "status", "deployment/grpo-operator", "--timeout=60s")
        return
    selector = "app.kubernetes.io/name=grpo-operator"
    job.kubectl("-n", NAMESPACE, "wait", "--for=delete", "pod", "-l", selector, "--timeout=60s")
