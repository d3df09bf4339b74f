"""``make bench-learning``: do we learn what TRL's GRPO learns?

The tiny job on the embedded Kubernetes, and TRL's GRPOTrainer, each with several seeds: the same first
weights, prompts, rewards and hyperparameters. Writes benchmarks/results/learning.json and .png.
Arguments: ours, peer, report (default: all three); curves are kept in build/learning in between.
"""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import start
import yaml

from grpo_devcluster import cluster
from grpo_devcluster.addons import kubectl
from grpo_devcluster.follow import JobView
from grpo_devcluster.install import devcluster_values, install_operator
from grpo_devcluster.packages import peers
from grpo_devcluster.paths import JOB_DATA, KUBECONFIG, REPO
from grpo_devcluster.report import load
from grpo_devcluster.results import RESULTS, record
from grpo_worker.model_files.config import model_config

STEPS, WINDOW, LAST = 120, 10, 20
OURS, PEER = range(1, 5), range(1, 9)
CURVES = REPO / "build" / "learning"
MANIFEST = REPO / "manifests" / "tiny-moe.yaml"
ENDED = frozenset({"Succeeded", "Failed"})


def main() -> None:
    wanted = sys.argv[1:] or ["ours", "peer", "report"]
    CURVES.mkdir(parents=True, exist_ok=True)
    if "ours" in wanted:
        run_ours()
    if "peer" in wanted:
        run_peer()
    if "report" in wanted:
        report()


def run_ours() -> None:
    """Jobs on real pods, one after the other."""
    cluster.prepare()
    try:
        install_operator(KUBECONFIG, devcluster_values(cluster.up()))
        for seed in OURS:
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


def run_peer() -> None:
    """TRL, with its packages in sight of its process alone."""
    here = Path(__file__).parent
    path = os.pathsep.join([str(REPO / "devcluster"), str(peers())])
    for seed in PEER:
        model = start.write(CURVES / f"model-{seed}", model_config("preset:tiny-moe"), seed)
        file = CURVES / f"peer-{seed}.json"
        command = [sys.executable, here / "peer.py", model, str(seed), str(STEPS), file]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True, stdout=subprocess.DEVNULL)


def report() -> None:
    """Figures and picture: where our mean lies among TRL's seeds."""
    ours, theirs = _curves("ours"), _curves("peer")
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
    print(record("learning", figures).read_text())


def _curves(who: str) -> np.ndarray:
    """[seeds, steps]: mean reward of each step, as a running mean."""
    files = sorted(CURVES.glob(f"{who}-*.json"))
    curves = np.array([json.loads(file.read_text())[:STEPS] for file in files])
    sums = np.cumsum(np.pad(curves, ((0, 0), (WINDOW, 0))), axis=1)
    counts = np.minimum(np.arange(1, STEPS + 1), WINDOW)
    return (sums[:, WINDOW:] - sums[:, :-WINDOW]) / counts


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


if __name__ == "__main__":
    main()
