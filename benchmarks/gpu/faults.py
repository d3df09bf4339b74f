"""A job of pods on GPUs that suffers one fault after the other, beside the same job without faults.

    python3 benchmarks/gpu/faults.py OUT MANIFEST calm faulted [--steps STEPS] [--only FAULT...]

``devcluster/gpu-node.sh faults`` runs it in the background. It starts the devcluster and installs the
operator if they are not there. Trainers and engines are deterministic, so that both runs should have the same
bits. Writes OUT/calm.json, then OUT/faulted.json: each fault with what shows that it happened and the seconds
until the next step was complete, the largest difference between the two runs' metrics over the steps of
both, and how many of these have the same bits. The file is written after each fault, so that a machine whose
time ends leaves what it has seen. A run that fails leaves OUT/RUN.txt, with what helps to understand why, and
no run follows it.
PYTHONPATH: operator, worker_images, devcluster, tests.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from grpo_devcluster import nvidia
from grpo_devcluster.addons import kubectl
from grpo_devcluster.follow import JobView
from grpo_devcluster.gpu_node.jobs import diagnosis, start_with_operator
from grpo_devcluster.install import NAMESPACE
from grpo_devcluster.paths import KUBECONFIG
from grpo_devcluster.report import load
from grpo_devcluster.results import stamp, write_raw
from grpo_devcluster.stages import StageError, fail
from support.faults import (
    agent,
    kill_container,
    kill_during_sync,
    kill_rank,
    main_process,
    report,
    step_of,
    stop_rank,
    uids,
    until,
    wait_step,
)  # fmt: skip
from support.jobs import ENDED

BETWEEN = 2  # undisturbed steps between two faults
HANG = 90  # seconds of restartPolicy.hangSeconds
PATIENCE = 180  # seconds for a step after a fault
COMPARED = ("actor/loss", "actor/grad_norm", "critic/score/mean", "train/train_rollout_logprob_abs_diff")
Fault = Callable[[JobView], str]  # injects it and returns what shows that it happened


def trainer_pod(job: JobView) -> str:
    """Kill the first process of a training pod."""
    victim = job.pods("trainer")[0]
    kill_container(victim, "ray-worker")
    name = victim["metadata"]["name"]
    until("its pod is replaced", lambda: name not in uids(job, "trainer"), PATIENCE)
    return f"{name} is replaced by {', '.join(uids(job, 'trainer'))}"


def rank(job: JobView) -> str:
    """Kill a rank's process."""
    before = report(job)["trainers"][0]
    kill_rank(job, 0)
    until("another process", lambda: report(job)["trainers"][0]["pid"] != before["pid"], PATIENCE)
    return f"process {before['pid']} is replaced by {report(job)['trainers'][0]['pid']}"


def rank_stopped(job: JobView) -> str:
    """Stop the last rank's process, so that NCCL's calls of the other ranks never return."""
    before = report(job)
    stop_rank(job, -1)
    until("a new attempt", lambda: report(job)["attempt"] > before["attempt"], HANG + PATIENCE)
    said = str(report(job)["lastFailure"])
    until(
        "other processes", lambda: set(_ranks(job)).isdisjoint(r["pid"] for r in before["trainers"]), PATIENCE
    )
    return said


def engine_generating(job: JobView) -> str:
    """Kill an engine's server while it generates."""
    pod = job.pods("rollout")[0]
    before = agent(pod)["restarts"]
    step = step_of(job)
    until("the next step begins", lambda: step_of(job) > step, PATIENCE, every=0.02)
    kill_container(pod, "engine")
    until("its agent counts it", lambda: agent(pod).get("restarts", 0) > before, 60, every=0.1)
    return f"restarts of the engine: {before}, then {agent(pod)['restarts']}"


def engine_updating(job: JobView) -> str:
    """Kill an engine's server while it receives a weight version."""
    pod = job.pods("rollout")[0]
    before = agent(pod)["restarts"]
    kill_during_sync(pod, main_process(pod, "engine"))
    until("its agent counts it", lambda: agent(pod).get("restarts", 0) > before, 60, every=0.1)
    log = job.kubectl("logs", pod["metadata"]["name"], "-c", "agent", "--tail=40")
    return "aborted version" if "aborted version" in log else "the update had ended before"


def trainer_agent(job: JobView) -> str:
    """Kill the agent of a training pod."""
    pid = main_process(job.pods("trainer")[0], "agent")
    os.kill(pid, signal.SIGKILL)
    until("it is gone", lambda: not Path(f"/proc/{pid}").exists(), 10, every=0.05)
    return f"process {pid} is gone"


def engine_agent(job: JobView) -> str:
    """Kill the agent of an engine."""
    pod = job.pods("rollout")[0]
    before = agent(pod)["instance"]
    kill_container(pod, "agent")
    until("another agent answers", lambda: agent(pod).get("instance", before) != before, 60)
    return f"agent {before} is replaced by {agent(pod)['instance']}"


def controller(job: JobView) -> str:
    """Kill the controller."""
    before = report(job)["attempt"]
    kill_container(job.pods("controller")[0], "controller")
    until("a new attempt", lambda: report(job)["attempt"] > before, PATIENCE)
    return f"attempt {before}, then {report(job)['attempt']}"


def ray_head(job: JobView) -> str:
    """Delete the pod of Ray's head. The ranks work on for a while before they end with their raylets."""
    before, attempt = uids(job, "head"), report(job)["attempt"]
    job.kubectl("delete", "pod", *before, "--wait=false", "--grace-period=0")
    until("another head", lambda: set(uids(job, "head").values()).isdisjoint(before.values()), PATIENCE)
    until("a new attempt", lambda: report(job)["attempt"] > attempt, PATIENCE)
    return f"{', '.join(before)} is replaced"


def gpu_taken(job: JobView) -> str:
    """Kill an engine while containers get no GPUs. They get them again once the job says why it waits."""
    pod = job.pods("rollout")[0]
    name, before = pod["metadata"]["name"], agent(pod)["restarts"]
    aside = nvidia.SPECIFICATION.rename(nvidia.SPECIFICATION.with_suffix(".aside"))
    try:
        kill_container(pod, "engine")
        said = until("the job names the container", lambda: _said_of(job, name), PATIENCE)
    finally:
        aside.rename(nvidia.SPECIFICATION)
    until("the engine serves again", lambda: agent(pod).get("restarts", 0) > before, PATIENCE)
    return str(said)


def _said_of(job: JobView, pod: str) -> str:
    """Return the first condition of a job that names this pod and the GPU's device, or ""."""
    said = (condition["message"] for condition in job.status()["conditions"])
    return next((text for text in said if pod in text and "CDI" in text), "")


def operator(job: JobView) -> str:
    """Delete the operator's pod."""
    found = job.kubectl("-n", NAMESPACE, "delete", "pod", "--all", "--wait")
    job.kubectl("-n", NAMESPACE, "rollout", "status", "deployment/grpo-operator", "--timeout=120s")
    return found.strip()


FAULTS: tuple[Fault, ...] = (
    *(trainer_agent, engine_agent, operator, rank, engine_generating),
    *(engine_updating, controller, trainer_pod, ray_head, gpu_taken, rank_stopped),
)
# Faults that the training ranks outlive, with the seconds in which these would end: NCCL's watchdog ends a
# process a minute after it has lost a member of a group.
OUTLIVED = {engine_generating: 0, engine_updating: 70, engine_agent: 0, operator: 0, gpu_taken: 0}
BY_NAME = {fault.__name__: fault for fault in FAULTS}


def begin(name: str, manifest: Path, steps: int) -> JobView:
    """Apply the deterministic job under this name."""
    job = yaml.safe_load(manifest.read_text())
    job["metadata"]["name"] = name
    spec = job["spec"]
    spec["totalSteps"] = steps
    spec["trainer"]["deterministic"] = True
    engine = spec["rollout"]["template"]["engine"]
    engine["deterministic"] = True
    engine["extraArgs"] = [*engine.get("extraArgs", []), "--disable-radix-cache"]
    spec["checkpoint"]["everySteps"] = 10
    spec["restartPolicy"] = {"hangSeconds": HANG}
    if spec.get("mode") != "colocated":  # beside offloaded state, copies would not fit a host of one GPU
        spec["checkpoint"]["memory"] = {"everySteps": 1}
    kubectl("apply", "-f", "-", stdin=json.dumps(job))
    return JobView(KUBECONFIG, name)


def _begun(job: JobView) -> bool:
    """Return whether the first step is complete. Raises AssertionError for a job that will have none."""
    status = job.status()
    assert status.get("phase") not in {"Invalid", *ENDED}, status
    return step_of(job) >= 1


def _ranks(job: JobView) -> list[int]:
    """Return the processes of the training ranks."""
    return [rank["pid"] for rank in report(job)["trainers"]]


def suffer(
    job: JobView, faults: Sequence[Fault], keep: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Inject faults, each after some undisturbed steps; return them with their recovery.

    ``keep``: takes what was found so far, after each fault.
    """
    found: list[dict[str, Any]] = []
    for fault in faults:
        wait_step(job, step_of(job) + BETWEEN, PATIENCE)
        started = time.monotonic()
        case: dict[str, Any] = {"fault": fault.__name__, "step": step_of(job)}
        ranks = _ranks(job)
        try:
            case["witness"] = fault(job)
            reached = until("the controller answers", lambda: step_of(job) + 1, PATIENCE) - 1
            wait_step(job, reached + 1, PATIENCE)
            case["seconds"] = round(time.monotonic() - started, 1)
            if fault in OUTLIVED:
                over_nccl = job.status()["weightPath"].startswith("nccl")
                time.sleep(OUTLIVED[fault] if over_nccl else 0)
                assert _ranks(job) == ranks, "the training ranks have ended"
        except AssertionError as error:
            case["failed"] = str(error)
        found.append(case)
        print(case, flush=True)
        keep(found)
    return found


def differences(calm: list[dict[str, Any]], faulted: list[dict[str, Any]]) -> dict[str, float]:
    """Return the largest difference of each metric over the steps of both; 0: the same bits."""
    pairs = list(zip(calm, faulted, strict=False))
    return {key: max((abs(one[key] - other[key]) for one, other in pairs), default=0.0) for key in COMPARED}


def equal_steps(calm: list[dict[str, Any]], faulted: list[dict[str, Any]]) -> int:
    """Return how many steps from the first on have the same metrics in both, to the last bit."""
    same = (
        all(one[key] == other[key] for key in COMPARED) for one, other in zip(calm, faulted, strict=False)
    )
    return sum(takewhile(bool, same))


def write(run: str, out: Path, manifest: Path, job: JobView, faults: list[dict[str, Any]]) -> None:
    """Write OUT/RUN.json."""
    steps = load(job.store())
    found: dict[str, Any] = {
        "manifest": manifest.stem, "status": job.status(), "steps": steps, "faults": faults
    }  # fmt: skip
    calm = out / "calm.json"
    if run == "faulted" and calm.exists():
        undisturbed = json.loads(calm.read_text())["steps"]
        found["differences"] = differences(undisturbed, steps)
        found["equal_steps"] = equal_steps(undisturbed, steps)
    write_raw(out / f"{run}.json", stamp(nvidia.names() if nvidia.present() else ""), **found)


def run(name: str, args: argparse.Namespace) -> bool:
    """Run one of the two jobs, and return whether it succeeded and outlived all faults."""
    job = begin(name, args.manifest, args.steps)
    keep = partial(write, name, args.out, args.manifest, job)
    succeeded = False
    try:
        until("the first step", lambda: _begun(job), 2 * PATIENCE)
        chosen = [BY_NAME[fault] for fault in args.only]
        faults = suffer(job, chosen, keep) if name == "faulted" else []
        status = job.wait(ENDED, 2 * PATIENCE)
        keep(faults)
        succeeded = status["phase"] == "Succeeded" and not any("failed" in case for case in faults)
    except (AssertionError, TimeoutError) as error:
        print(f"{name}: {error}", flush=True)
    if not succeeded:
        (args.out / f"{name}.txt").write_text(diagnosis(job))
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground", "--timeout=120s")
    return succeeded


def main() -> None:
    """Run the jobs, up to the first one that fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("runs", nargs="+", choices=["calm", "faulted"])
    parser.add_argument("--only", nargs="+", choices=BY_NAME, default=list(BY_NAME), help="these faults")
    parser.add_argument("--steps", type=int, default=60, help="steps of each job (60)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        start_with_operator()
        succeeded = all(run(name, args) for name in args.runs)
    except StageError as error:
        fail(error)
    sys.exit(0 if succeeded else 1)


if __name__ == "__main__":
    main()
