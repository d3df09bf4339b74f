"""``make bench-pod-steps``: phases of the steps of small jobs on real pods, for the step model on CPUs.

    pod_steps.py [JOB ...]

Each job runs in the embedded cluster, alone. ``tiny-moe`` is manifests/tiny-moe.yaml with fewer steps. It
and ``tiny-moe-spread`` are held out of every fit. The other jobs train other models, in other layouts and on
other shapes of a batch; pod_fit.py fits the model's terms to them. Writes benchmarks/results/pod_steps.json.
Needs a machine on which nothing else runs.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from grpo_devcluster import cluster
from grpo_devcluster.addons import kubectl
from grpo_devcluster.follow import JobView
from grpo_devcluster.install import devcluster_values, install_operator
from grpo_devcluster.paths import JOB_DATA, KUBECONFIG, REPO
from grpo_devcluster.report import load
from grpo_devcluster.results import record_cases
from pod_cases import CASES, PodCase

sys.path.insert(0, str(REPO / "benchmarks" / "learning"))

import first_weights

MODELS = JOB_DATA / "pod-steps"
ENDED = frozenset({"Succeeded", "Failed"})


def main() -> None:
    """Run the jobs named as arguments, by default all, and record their steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    names = parser.parse_args().jobs
    if unknown := set(names) - set(CASES):
        parser.error(f"no such job: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    cluster.prepare()
    install_operator(KUBECONFIG, devcluster_values(cluster.up()))
    failed = []
    try:
        for name in names:
            try:
                record_cases("pod_steps", {name: _run(name, CASES[name])})
            except (RuntimeError, TimeoutError) as error:
                failed.append(f"{name}: {error}")
    finally:
        cluster.down()
    if failed:
        sys.exit("\n".join(failed))


def _run(name: str, case: PodCase) -> list[dict[str, float]]:
    """Run one job to its end and return the seconds and sizes of its steps."""
    if case.model is not None:
        shutil.rmtree(MODELS, ignore_errors=True)
        first_weights.write(MODELS / name, case.model, 1)
    manifest = {
        "apiVersion": "rl.grpo.dev/v1alpha1",
        "kind": "GRPOJob",
        "metadata": {"name": name},
        "spec": case.spec(name, MODELS),
    }
    file = Path(JOB_DATA / f"{name}.yaml")
    file.write_text(yaml.safe_dump(manifest))
    kubectl("apply", "-f", str(file), kubeconfig=KUBECONFIG)
    job = JobView(KUBECONFIG, name)
    try:
        status = job.wait(ENDED, 600)
        if status["phase"] != "Succeeded":
            reasons = [c["message"] for c in status["conditions"] if c["type"] == "Failed"]
            raise RuntimeError(f"ended as {status['phase']}: {reasons}")
        uid = job.get()["metadata"]["uid"][:8]
        return [_kept(step) for step in load(JOB_DATA / f"default-{name}-{uid}")]
    finally:
        job.kubectl("delete", "grpojob", name, "--cascade=foreground")


def _kept(step: dict[str, Any]) -> dict[str, float]:
    wanted = ("timing_s/", "response_length/mean", "perf/total_num_tokens", "step")
    return {key: value for key, value in step.items() if key.startswith(wanted)}


if __name__ == "__main__":
    main()
