"""Starts the devcluster from a pack, runs pods on GPUs, and removes the devcluster.

Pods of one GPU each compute at the same time. A pod that asks for a GPU more than there are must wait.
"""

import json
import os
import subprocess
import sys
import time
from functools import partial
from typing import Any

from grpo_devcluster import cluster, nvidia, processes
from grpo_devcluster.addons import kubectl
from grpo_devcluster.gpu_node import pods
from grpo_devcluster.images import environment_mounts
from grpo_devcluster.paths import PACK
from grpo_devcluster.stages import StageError, fail, stage, wait_for

_AT_ONCE = 2
_QUESTIONS = ("describe pods", "describe nodes", "get events --sort-by=.lastTimestamp")
_DAEMONS = ("kubelet", "containerd", "nvidia-device-plugin", "kube-scheduler", "kube-proxy")


def main() -> None:
    """Run the check. On failure print logs, remove the devcluster all the same, and exit 1."""
    started = time.monotonic()
    try:
        if PACK is None:
            raise StageError("GRPO_DEVCLUSTER_PACK is not set: run devcluster/gpu-node.sh check.")
        if not nvidia.present():
            raise StageError("this machine has no /dev/nvidiactl: the check needs NVIDIA's driver.")
        cluster.prepare()
        try:
            _check(cluster.up()["trainer"])
        except BaseException:
            _diagnose()
            raise
        finally:
            cluster.down()
    except StageError as error:
        fail(error)
    print(f"GPU node: passed in {time.monotonic() - started:.1f} s")


def _check(image: str) -> None:
    gpus = nvidia.allocatable()
    print(f"    the node offers {gpus} GPUs")
    wait_for("the default service account", _has_account, 30)
    names = [f"gpu-{i}" for i in range(min(gpus, _AT_ONCE))]
    with stage(f"{len(names)} pods of one GPU"):
        for name in names:
            _apply(pods.gpu_pod(name, image, 1, [sys.executable, "-c", pods.PROGRAM], environment_mounts()))
        for name in names:
            wait_for(f"pod {name}", partial(_ended, name), 300)
        logs = {name: kubectl("logs", name) for name in names}
    for name, log in logs.items():
        print(f"    {name}: {log.strip().splitlines()[-1] if log.strip() else 'no output'}")
    found = pods.faults(logs, 1)
    if found:
        raise StageError("; ".join(found))
    with stage(f"a pod of {gpus + 1} GPUs"):
        _apply(pods.gpu_pod("too-many", image, gpus + 1, ["/bin/true"], []))
        wait_for("the scheduler's reason", lambda: bool(pods.waits_for_gpus(_pod("too-many"))), 60)
        print(f"    too-many is Pending: {pods.waits_for_gpus(_pod('too-many'))}")


def _has_account() -> bool:
    return bool(kubectl("get", "serviceaccount", "default", "--ignore-not-found", "-o", "name"))


def _apply(pod: dict[str, Any]) -> None:
    kubectl("apply", "-f", "-", stdin=json.dumps(pod))


def _pod(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(kubectl("get", "pod", name, "-o", "json"))
    return found


def _ended(name: str) -> bool:
    """Return whether a pod has succeeded. Raises StageError if it has failed."""
    phase = _pod(name)["status"].get("phase")
    if phase == "Failed":
        raise StageError(f"pod {name} failed: {kubectl('logs', name, '--tail=20')}")
    return bool(phase == "Succeeded")


def _diagnose() -> None:
    """Print what helps to understand a failure, because the machine may be gone afterwards."""
    for command in _QUESTIONS:
        try:
            answer = kubectl(*command.split())
        except StageError as error:
            answer = str(error)
        _section(f"kubectl {command}", answer)
    for daemon in _DAEMONS:
        log = processes.log_file(daemon)
        _section(str(log), log.read_text(errors="replace") if log.exists() else "no log")
    places = f"--library-search-path={os.environ.get('LD_LIBRARY_PATH', '')}"
    for arguments in (["list"], ["generate", places]):
        line = ["nvidia-ctk", "--debug", "cdi", *arguments]
        done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        _section(" ".join(line), done.stdout)


def _section(title: str, text: str) -> None:
    print(f"--- {title}\n{text[-4000:]}")


if __name__ == "__main__":
    main()
