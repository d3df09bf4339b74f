"""Runs GRPOJobs in a running devcluster, and keeps their metrics, statuses and logs.

``python -m grpo_devcluster.gpu_node.jobs OUT SECONDS [--together] MANIFEST...``: writes OUT/NAME.json and,
for a job that does not succeed within SECONDS, OUT/NAME.txt with what helps to understand why. The jobs run
one after the other, or at once, which needs GPUs for all of them.
"""

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from grpo_devcluster import cluster, nvidia
from grpo_devcluster.addons import kubectl
from grpo_devcluster.demo import ENDED
from grpo_devcluster.follow import JobView
from grpo_devcluster.install import devcluster_values, install_operator
from grpo_devcluster.paths import KUBECONFIG
from grpo_devcluster.report import load, summarise
from grpo_devcluster.results import stamp
from grpo_devcluster.stages import StageError, fail, stage

_LAST_LINES = ("--timestamps", "--tail=400")


def main() -> None:
    """Run the jobs; exit 1 if one of them does not succeed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("manifests", type=Path, nargs="+")
    parser.add_argument("--together", action="store_true", help="run the jobs at once")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        start_with_operator()
        with ThreadPoolExecutor(len(args.manifests) if args.together else 1) as pool:
            succeeded = list(pool.map(partial(run_job, seconds=args.seconds, out=args.out), args.manifests))
    except StageError as error:
        fail(error)
    sys.exit(0 if all(succeeded) else 1)


def start_with_operator() -> None:
    """Start the devcluster, unless it runs, and install this checkout's operator in it."""
    cluster.prepare()
    values = devcluster_values(cluster.up())
    with stage("helm install grpo-operator"):
        install_operator(KUBECONFIG, values)


def run_job(manifest: Path, seconds: float, out: Path) -> bool:
    """Run one job, write its files, and return whether it succeeded."""
    job = JobView(KUBECONFIG, manifest.stem)
    started = time.monotonic()
    with stage(job.name):
        kubectl("apply", "-f", manifest)
        try:
            status = job.wait(ENDED, seconds)
        except TimeoutError as error:
            print(f"    {error}")
            status = job.status()
        succeeded = status.get("phase") == "Succeeded"
        if not succeeded:
            (out / f"{job.name}.txt").write_text(diagnosis(job))
        taken = time.monotonic() - started
        record = {"of": stamp(nvidia.names()), "status": status, "seconds": taken, **_steps(job.store())}
        (out / f"{job.name}.json").write_text(json.dumps(record))
        print(f"    figures: {json.dumps(record.get('figures'))}")
        job.kubectl("delete", "grpojob", job.name, "--cascade=foreground", "--timeout=120s")
    return succeeded


def _steps(store: Path) -> dict[str, Any]:
    """Return the metrics of the steps that were completed, and their summary."""
    steps = load(store) if (store / "metrics.jsonl").exists() else []
    return {"steps": steps, "figures": summarise(steps) if steps else None}


def diagnosis(job: JobView) -> str:
    """Return descriptions, events and logs."""
    questions = [
        ("describe", "grpojobs,rolloutpools,rayclusters,pods"),
        ("get", "events", "--sort-by=.lastTimestamp"),
        ("logs", "-n", "grpo-system", "deployment/grpo-operator", *_LAST_LINES),
    ]
    for pod in job.pods():
        name = pod["metadata"]["name"]
        parts = pod["spec"]["containers"] + pod["spec"].get("initContainers", [])
        for container in parts:
            questions.append(("logs", name, "-c", container["name"], *_LAST_LINES))
            status = pod["status"].get("containerStatuses", []) + pod["status"].get(
                "initContainerStatuses", []
            )
            if any(s["name"] == container["name"] and s.get("restartCount") for s in status):
                questions.append(("logs", name, "-c", container["name"], "--previous", *_LAST_LINES))
    return "\n".join(f"--- kubectl {' '.join(question)}\n{_answer(question)}" for question in questions)


def _answer(question: tuple[str, ...]) -> str:
    try:
        return kubectl(*question)
    except StageError as error:
        return str(error)


if __name__ == "__main__":
    main()
