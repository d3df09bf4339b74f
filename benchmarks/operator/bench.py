"""``make bench-operator``: creation beside a bare RayCluster, and many jobs at once.

    bench.py [JOBS ...]      numbers of jobs to measure at, default 10, 100 and 300
    bench.py --only JOBS     this number alone, without creation, idle minutes and restart

Real API server, scheduler, KubeRay and operator; KWOK runs the pods. A large job has 66 pods (head,
controller, 32 training pods, 32 rollout pods), a small one 6. Writes benchmarks/results/operator.json.

The idle minutes and the restart come after the second number. IDLE_SECONDS in the environment changes the ten
idle minutes. The first LARGE_JOBS (environment, default 100) jobs are large, the others small: on two cores
scheduler, KubeRay and KWOK cannot start 20 000 pods in an hour. ``large_jobs_N`` says how many of N jobs were
large, so figures of different N are not a growth curve.
"""

import argparse
import copy
import json
import os
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

from grpo_devcluster import cluster
from grpo_devcluster.addons import kubectl
from grpo_devcluster.fakenodes import gpu_cluster, volume
from grpo_devcluster.operator_process import install_crds, operator_process
from grpo_devcluster.paths import REPO
from grpo_devcluster.results import record, record_cases

METRICS = "http://127.0.0.1:9090/metrics"
PODS, IDLE_SECONDS = 66, int(os.environ.get("IDLE_SECONDS", "600"))
LARGE_JOBS = int(os.environ.get("LARGE_JOBS", "100"))
LARGE, SMALL = "256/256 8/8", "2/2 2/2"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", nargs="*", type=int, default=[10, 100, 300])
    parser.add_argument("--only", type=int, metavar="JOBS")
    args = parser.parse_args()
    counts, figures = args.jobs, _Figures()
    if len(counts) < 2:
        parser.error("give at least two numbers of jobs, or --only JOBS")
    with tempfile.TemporaryDirectory() as directory:
        cluster.down()
        cluster.up(with_node=False)
        install_crds()
        # Room for all jobs at once, so that none waits: nodes of 8 x as many GPU pods.
        nodes = [_roomy(node) for node in gpu_cluster()]
        _apply([*nodes, *volume("grpo-checkpoints")])
        if args.only:
            with operator_process(Path(directory)) as operator:
                _wait("the operator's metrics", _answers, 60)
                alone = _many(args.only, operator)
            del alone["writes_per_change_max"]  # of all numbers of jobs, so it needs a whole run
            figures |= alone
            cluster.down()
            return
        with operator_process(Path(directory)) as operator:
            figures |= _creation()
            for count in counts[:2]:
                figures |= _many(count, operator)
            figures |= _idle()
        with operator_process(Path(directory)) as operator:
            figures |= _restart(counts[1], operator)
            for count in counts[2:]:
                figures |= _many(count, operator)
        cluster.down()
    print(json.dumps(figures, indent=2))


class _Figures(dict[str, float]):
    """Figures that are recorded as they are measured, because a run takes most of an hour."""

    def __ior__(self, more: dict[str, float]) -> "_Figures":  # type: ignore[override,misc]
        most = max(self.get("writes_per_change_max", 0), more.get("writes_per_change_max", 0))
        self.update(more)
        if most:
            self["writes_per_change_max"] = most
        record("operator", {name: self[name] for name in more})
        return self


def _roomy(node: dict[str, Any]) -> dict[str, Any]:
    node = copy.deepcopy(node)
    for offer in (node["status"]["capacity"], node["status"]["allocatable"]):
        offer |= {"cpu": "100k", "memory": "2000Ti", "pods": "5000"}
        offer |= {key: "5000" for key in ("nvidia.com/gpu", "rdma/hca") if key in offer}
    return node


def _job(name: str, large: bool = True) -> dict[str, Any]:
    file = "deepseek-v3-512xh100.yaml" if large else "tiny-moe.yaml"
    manifest = yaml.safe_load((REPO / "manifests" / file).read_text())
    manifest["metadata"]["name"] = name
    return dict(manifest)


def _apply(objects: list[dict[str, Any]]) -> None:
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))


def _wait(what: str, check: Callable[[], bool], timeout: float, every: float = 0.05) -> float:
    """Return the seconds until ``check`` holds, polled every ``every`` seconds."""
    started = time.monotonic()
    while not check():
        if time.monotonic() - started > timeout:
            raise TimeoutError(f"{what}: not within {timeout:.0f} s")
        time.sleep(every)
    return time.monotonic() - started


def _has_pods(cluster_name: str, count: int) -> bool:
    selector = f"ray.io/cluster={cluster_name}"
    return len(kubectl("get", "pods", "-l", selector, "-o", "name").split()) == count


def _creation(rounds: int = 8) -> dict[str, float]:
    """Return the shortest time from apply until all pods exist: of a GRPOJob, and of its RayCluster alone.

    The two alternate. The file keeps the seconds of every round.
    """
    with_job, bare = [], []
    for number in range(rounds):
        name = f"create-{number}"
        started = time.monotonic()
        _apply([_job(name)])
        _wait("pods of the job", partial(_has_pods, name, PODS), 120)
        with_job.append(time.monotonic() - started)
        manifest = json.loads(kubectl("get", "raycluster", name, "-o", "json"))
        kubectl("delete", "grpojob", name)
        _wait("pods to go", partial(_has_pods, name, 0), 120)
        plain = f"bare-{number}"
        manifest["metadata"] = {"name": plain, "namespace": "default"}
        manifest.pop("status", None)
        started = time.monotonic()
        _apply([manifest])
        _wait("pods of the RayCluster", partial(_has_pods, plain, PODS), 120)
        bare.append(time.monotonic() - started)
        kubectl("delete", "raycluster", plain)
        _wait("pods to go", partial(_has_pods, plain, 0), 120)
    record_cases("operator", {"create_seconds_rounds": {"grpojob": with_job, "raycluster": bare}})
    best, base = min(with_job), min(bare)
    return {
        "create_seconds": round(best, 2),
        "create_seconds_raycluster": round(base, 2),
        "create_ratio_vs_raycluster": round(best / base, 3),
    }


def _answers() -> bool:
    try:
        return bool(_samples())
    except OSError:
        return False


def _samples() -> dict[str, float]:
    """Return the operator's metrics by name with labels."""
    text = urllib.request.urlopen(METRICS, timeout=10).read().decode()
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def _writes(samples: dict[str, float]) -> float:
    return sum(v for k, v in samples.items() if k.startswith("grpo_api_requests_total"))


def _quantile(before: dict[str, float], after: dict[str, float], q: float) -> float:
    """Return the upper bound, in seconds, of the histogram bucket that holds the quantile."""
    prefix = 'grpo_reconcile_seconds_bucket{kind="GRPOJob",le="'
    buckets = {k[len(prefix) : -2]: v - before.get(k, 0) for k, v in after.items() if k.startswith(prefix)}
    total = buckets["+Inf"]
    return next(float(edge) for edge, count in buckets.items() if count >= q * total)


def _many(count: int, operator: subprocess.Popen[bytes]) -> dict[str, float]:
    """Bring up ``count`` jobs and change some; return reconcile times of both and writes per change."""
    before = _samples()
    started = time.monotonic()
    have = len(kubectl("get", "grpojobs", "-o", "name").split())
    _apply([_job(f"job-{number}", number < LARGE_JOBS) for number in range(have, count)])
    _wait("all pods ready", lambda: _ready(count), 3600, every=2 + count / 50)
    seconds = time.monotonic() - started
    _settle()
    ready = _samples()
    writes = _writes_per_change(count)
    changed = _samples()
    process = psutil.Process(operator.pid)
    return {
        f"start_seconds_{count}": round(seconds, 1),
        f"start_reconcile_p50_s_{count}": _quantile(before, ready, 0.50),
        f"start_reconcile_p99_s_{count}": _quantile(before, ready, 0.99),
        f"reconcile_p50_s_{count}": _quantile(ready, changed, 0.50),
        f"reconcile_p99_s_{count}": _quantile(ready, changed, 0.99),
        f"large_jobs_{count}": min(count, LARGE_JOBS),
        f"rss_mib_{count}": round(process.memory_info().rss / 2**20, 1),
        f"cpu_seconds_{count}": round(sum(process.cpu_times()[:2]), 1),
        "writes_per_change_max": writes,
    }


def _settle(quiet: float = 10) -> None:
    """Wait until the operator has not written for ``quiet`` seconds.

    Writes of jobs that have just started must not count as the cost of a change.
    """
    before = -1.0
    while (now := _writes(_samples())) != before:
        before = now
        time.sleep(quiet)


def _ready(count: int) -> bool:
    path = "{range .items[*]}{.status.trainReady} {.status.rolloutReady}{'\\n'}{end}"
    rows = kubectl("get", "grpojobs", "-o", f"jsonpath={path}").splitlines()
    return rows.count(LARGE) + rows.count(SMALL) == count


def _writes_per_change(jobs: int, changes: int = 10) -> float:
    """Return the most writes of the operator for one edit of a spec that changes the job's status."""
    most = 0.0
    for number in range(min(changes, jobs)):
        before = _writes(_samples())
        patch = json.dumps({"spec": {"totalSteps": 10 * jobs + number}})
        kubectl("patch", "grpojob", f"job-{number}", "--type=merge", "-p", patch)
        time.sleep(3)
        most = max(most, _writes(_samples()) - before)
    return most


def _idle() -> dict[str, float]:
    """Return the writes while nothing changes."""
    before = _writes(_samples())
    time.sleep(IDLE_SECONDS)
    return {"idle_writes": _writes(_samples()) - before, "idle_seconds": IDLE_SECONDS}


def _restart(count: int, operator: subprocess.Popen[bytes]) -> dict[str, float]:
    """Return the seconds until a new operator has reconciled every job. Raises RuntimeError if it writes."""

    def synced() -> bool:
        try:
            samples = _samples()
        except OSError:
            return False
        return samples.get('grpo_reconciles_total{kind="GRPOJob",result="success"}', 0) >= count

    seconds = _wait("every job reconciled", synced, 300)
    time.sleep(5)
    writes = _writes(_samples())
    if writes:
        raise RuntimeError(f"the operator wrote {writes:.0f} times after its restart")
    rss = psutil.Process(operator.pid).memory_info().rss
    return {
        f"restart_sync_seconds_{count}": round(seconds, 2),
        f"restart_rss_mib_{count}": round(rss / 2**20, 1),
    }


if __name__ == "__main__":
    main()
