"""``make demo``: set up, install, train a mixture of experts on real pods, report.

The model is tiny on a machine without GPUs, and has a billion parameters on one with NVIDIA GPUs.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

from grpo_devcluster import cluster, nvidia
from grpo_devcluster.addons import kubectl
from grpo_devcluster.follow import JobView, memory_used
from grpo_devcluster.gobuild import everything_built, link_tools
from grpo_devcluster.images import environment
from grpo_devcluster.install import PATHS_OF_NODES, devcluster_values, install_operator
from grpo_devcluster.paths import KUBECONFIG, REPO
from grpo_devcluster.results import record
from grpo_devcluster.stages import StageError, fail, run, stage

MANIFESTS = REPO / "manifests"
PICTURE = REPO / "build" / "demo" / "reward.png"
ENDED = frozenset({"Succeeded", "Failed"})


def main() -> None:
    """Run the demo and print its summary; exit 1 when a step fails."""
    try:
        demo()
    except (StageError, TimeoutError) as error:
        fail(StageError(str(error)))


def demo() -> None:
    """Run all stages. With KUBECONFIG set, use that cluster without GPUs instead of the embedded one."""
    started, idle = time.monotonic(), memory_used()
    cold = not everything_built()
    own = os.environ.get("KUBECONFIG")
    if own:
        cluster.prepare_client()
    else:
        cluster.prepare()
    kubeconfig = Path(own) if own else KUBECONFIG
    values = _own_values() if own else devcluster_values(cluster.up())
    with stage("helm install grpo-operator"):
        install_operator(kubeconfig, values)
    manifest = manifest_for(0 if own or not nvidia.present() else nvidia.allocatable())
    job = JobView(kubeconfig, manifest.stem)
    with stage(f"kubectl apply -f {manifest.relative_to(REPO)}"):
        # A finished job of an earlier demo is replaced, so that each demo trains from step 0.
        job.kubectl("delete", "grpojob", job.name, "--ignore-not-found", "--cascade=foreground")
        kubectl("apply", "-f", manifest, kubeconfig=kubeconfig)
    with stage("training"):
        status = job.wait(ENDED, 1800)
    seconds = time.monotonic() - started
    if status["phase"] != "Succeeded":
        raise StageError(f"the job ended as {status['phase']}: {_failure(status)}")
    figures = {"peak_memory_gib": round((job.peak_used - idle) / 2**30, 2)}
    figures["cold_seconds" if cold else "warm_seconds"] = round(seconds, 1)
    _summary(job, manifest, status, figures, own is None)


def manifest_for(gpus: int) -> Path:
    """Return the job for a node with this many GPUs. With one GPU, trainer and engine take turns on it."""
    if gpus == 0:
        return MANIFESTS / "tiny-moe.yaml"
    return MANIFESTS / "gpu" / f"deepseek-v3-1b-{min(gpus, 2)}gpu.yaml"


def _own_values() -> dict[str, Any]:
    """Return chart values for the user's cluster: what the job needs, and the JSON file of GRPO_VALUES."""
    path = os.environ.get("GRPO_VALUES")
    try:
        given = dict(json.loads(Path(path).read_text())) if path else {}
    except (OSError, ValueError) as error:
        raise StageError(f"GRPO_VALUES={path} is not a readable JSON file of values: {error}") from error
    watched: dict[str, Any] = {} if given.get("allNamespaces") else {"watchNamespaces": ["default"]}
    return watched | {"admissionPolicies": PATHS_OF_NODES} | given


def _failure(status: dict[str, Any]) -> str:
    return "; ".join(c["message"] for c in status["conditions"] if c["type"] == "Failed")


def _summary(
    job: JobView, manifest: Path, status: dict[str, Any], figures: dict[str, float], local: bool
) -> None:
    print("\n" + job.kubectl("get", "grpojobs,rolloutpools"))
    if local:
        store = job.store()
        run_figures = _report(store)
        figures |= run_figures
        name = "demo_gpu" if nvidia.present() else "demo"
        path = record(name, {k: v for k, v in figures.items() if k != "steps"})
        print(
            f"reward        {figures['reward_first_quarter']:.3f} (first quarter of the steps) -> "
            f"{figures['reward_last_quarter']:.3f} (last quarter), p = {figures['p_value']:.1e}"
        )
        print(f"reward curve  {PICTURE}")
        print(
            f"seconds       {figures['step_seconds']:.2f} a step, of which "
            f"{figures['sync_seconds']:.2f} weight sync"
        )
        print(f"log-prob gap  {figures['logprob_gap_max']:.1e} at most between trainer and engines")
        print(f"TensorBoard   {store / 'tensorboard'}")
        print(f"figures       {path}")
    restarts = status.get("restarts") or {}
    print(f"restarts      job {restarts.get('job', 0)}, infrastructure {restarts.get('infrastructure', 0)}")
    for name in ("cold_seconds", "warm_seconds"):
        if name in figures:
            print(f"duration      {figures[name]:.0f} s ({name.removesuffix('_seconds')})")
    print(f"peak memory   {figures['peak_memory_gib']:.1f} GiB")
    print(f"kubeconfig    {job.kubeconfig}")
    print(f"\nTry next:\n  export KUBECONFIG={job.kubeconfig} PATH=$PATH:{_kubectl_directory()}")
    print("  kubectl get grpojobs,rolloutpools,rayclusters,pods")
    print(f"  kubectl describe grpojob {job.name}")
    print(f"  kubectl delete grpojob {job.name} && kubectl apply -f {manifest.relative_to(REPO)}")
    print("  kubectl delete pod -l rl.grpo.dev/pool=trainer   # while it trains: watch it recover")
    print("  make down")


def _report(store: Path) -> dict[str, float]:
    output = run(
        [environment() / "bin" / "python", "-m", "grpo_devcluster.report", store, PICTURE],
        step="reading the run's metrics",
        remedy=f"Is {store}/metrics.jsonl there?",
        env={"PYTHONPATH": str(REPO / "devcluster")},
    )
    *curve, figures = output.strip().splitlines()
    print(f"reward        {curve[-1]}")
    data: dict[str, float] = json.loads(figures)
    return data


def _kubectl_directory() -> Path:
    """Return a folder where the built kubectl and helm have their plain names."""
    return link_tools(("kubectl", "helm"), REPO / "build" / "bin")


if __name__ == "__main__":
    main()
