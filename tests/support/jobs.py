"""Jobs on the devcluster."""

import copy
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
import pytest
import yaml
from grpo_devcluster import cluster
from grpo_devcluster.follow import JobView
from grpo_devcluster.install import devcluster_values, install_operator
from grpo_devcluster.paths import JOB_DATA, KUBECONFIG, REPO

ENDED = frozenset({"Succeeded", "Failed"})


STEPS = 112


Start = Callable[..., JobView]


def apply(kubeconfig: Path, text: str, *arguments: str) -> str:
    """kubectl with a manifest on standard input."""
    from grpo_devcluster.gobuild import binary

    command = [str(binary("kubectl")), f"--kubeconfig={kubeconfig}", *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def store_of(job: JobView) -> Path:
    """The job's folder of checkpoints and metrics on this machine."""
    return JOB_DATA / f"{job.namespace}-{job.name}-{job.get()['metadata']['uid'][:8]}"
