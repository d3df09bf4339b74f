"""``make bench-learning``: reward curves of our GRPO and of TRL's.

The tiny job on the embedded Kubernetes, and TRL's GRPOTrainer, each with several seeds: the same first
weights, prompts, rewards and hyperparameters. Writes benchmarks/results/learning.json and .png. The parts can
be run one by one (``run.py ours``); curves are kept in build/learning and in the results file.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import first_weights
import numpy as np
import yaml

from grpo_devcluster import cluster
from grpo_devcluster.addons import kubectl
from grpo_devcluster.follow import JobView
from grpo_devcluster.install import devcluster_values, install_operator
from grpo_devcluster.packages import peers
from grpo_devcluster.paths import JOB_DATA, KUBECONFIG, REPO
from grpo_devcluster.report import load
from grpo_devcluster.results import RESULTS, record, record_cases
from grpo_worker.model_files.config import model_config

STEPS, WINDOW, LAST = 120, 10, 20
OUR_SEEDS, TRL_SEEDS = range(1, 5), range(1, 9)
CURVES = REPO / "build" / "learning"
MANIFEST = REPO / "manifests" / "tiny-moe.yaml"
ENDED = frozenset({"Succeeded", "Failed"})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", default=[*PARTS], metavar="|".join(PARTS))
    CURVES.mkdir(parents=True, exist_ok=True)
    for part in parser.parse_args().parts:
        PARTS[part]()


def run_ours() -> None:
    """Run our jobs on real pods, one after the other."""
    cluster.prepare()
    try:
        install_operator(KUBECONFIG, devcluster_values(cluster.up()))
        for seed in OUR_SEEDS:
            _job(seed)
    finally:
        cluster.down()


def _job(seed: int) -> None:
    manifest = copy.deepcopy(yaml.safe_load(MANIFEST.read_text()))
    manifest["metadata"]["name"] = name = f"learning-{seed}"
    manifest["spec"] |= {"seed": seed, "totalSteps": STEPS}
    file = CURVES / f"{name}.yaml"
    file.write_text(yaml.safe_dump(manifest))
    kubectl("apply", "-f", file, kubeconfig=KUBECONFIG)
    job = JobView(KUBECONFIG, name)
    status = job.wait(ENDED, 1800)
    assert status["phase"] == "Succeeded", status
    store = JOB_DATA / f"{job.namespace}-{name}-{job.get()['metadata']['uid'][:8]}"
    curve = [record["critic/score/mean"] for record in load(store)]
    (CURVES / f"ours-{seed}.json").write_text(json.dumps(curve))
    job.kubectl("delete", "grpojob", name, "--cascade=foreground")


def run_trl() -> None:
    """Run TRL. Only its process imports its packages."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(REPO / "devcluster"), str(peers())])
    for seed in TRL_SEEDS:
        model = first_weights.write(CURVES / f"model-{seed}", model_config("preset:tiny-moe"), seed)
        file = CURVES / f"trl-{seed}.json"
        own = ["--seed", str(seed), "--steps", str(STEPS)]
        command = [sys.executable, str(here / "trl_curve.py"), str(model), str(file), *own]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True, stdout=subprocess.DEVNULL)


def report() -> None:
    """Record the curves, and how often our mean lies between TRL's lowest and highest seed."""
    ours, theirs = _curves("ours"), _curves("trl")
    mean, low, high = ours.mean(0), theirs.min(0), theirs.max(0)
    final_ours, final_theirs = ours[:, -LAST:].mean(1), theirs[:, -LAST:].mean(1)
    figures = {
        "inside_trl_seeds_pct": 100 * float(((low <= mean) & (mean <= high)).mean()),
        "final_reward": float(final_ours.mean()),
        "final_reward_trl": float(final_theirs.mean()),
        "final_reward_trl_min": float(final_theirs.min()),
        "final_reward_trl_max": float(final_theirs.max()),
        "seeds": len(ours),
        "seeds_trl": len(theirs),
        "steps": STEPS,
    }
    _picture(ours, theirs)
    record_cases("learning", {"ours": ours.tolist(), "trl": theirs.tolist()})
    record("learning", figures)
    print(json.dumps(figures, indent=1))


def _curves(who: str) -> np.ndarray:
    """Return [seeds, steps]: a running mean of the steps' mean rewards."""
    files = sorted(CURVES.glob(f"{who}-*.json"))
    curves = np.array([json.loads(file.read_text())[:STEPS] for file in files])
    sums = np.cumsum(np.pad(curves, ((0, 0), (WINDOW, 0))), axis=1)
    counts = np.minimum(np.arange(1, STEPS + 1), WINDOW)
    means: np.ndarray = (sums[:, WINDOW:] - sums[:, :-WINDOW]) / counts
    return means


def _picture(ours: np.ndarray, theirs: np.ndarray) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    steps = np.arange(1, STEPS + 1)
    axes.fill_between(steps, theirs.min(0), theirs.max(0), alpha=0.25, label=f"TRL, {len(theirs)} seeds")
    axes.plot(steps, theirs.mean(0), label="TRL, mean")
    for curve in ours:
        axes.plot(steps, curve, color="tab:orange", alpha=0.3)
    axes.plot(steps, ours.mean(0), color="tab:orange", label=f"grpo-operator, mean of {len(ours)} seeds")
    axes.set(xlabel="step", ylabel=f"mean reward (running mean of {WINDOW} steps)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(RESULTS / "learning.png", dpi=100)


PARTS = {"ours": run_ours, "trl": run_trl, "report": report}

if __name__ == "__main__":
    main()
