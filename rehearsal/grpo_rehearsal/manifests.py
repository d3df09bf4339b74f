"""Checks of every manifest with GPUs, for ``make rehearse manifests``.

A manifest counts when its plan fits, when SGLang's own layers were built for its engines and have the weights
that the plan counts, and when a short rehearsal of it has succeeded.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from grpo_devcluster.cpu_engine import environment
from grpo_devcluster.paths import REPO
from grpo_operator.api.base import Device
from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.cli.manifest import Manifest
from grpo_operator.plan.planner.resolve import RefusedError, engine_shape, resolve

_SCALES = 0.002  # of the bytes: FP8 scales and the router's bias, which the planner leaves out
_LAYERS = 4  # enough to have layers with and without experts


class GpuJob(NamedTuple):
    """The job of a manifest, and the engines that it uses: its own, or those of a pool in the same file."""

    file: Path
    spec: GRPOJobSpec
    pool: RolloutTemplate


def gpu_manifests(folder: Path = REPO / "manifests") -> Iterator[GpuJob]:
    """Yield the manifests of jobs with GPUs."""
    for file in sorted(folder.glob("*.yaml")):
        manifest = Manifest.read(file)
        ((_, body),) = manifest.jobs
        spec = GRPOJobSpec.model_validate(body)
        if spec.trainer.device is Device.CUDA:
            yield GpuJob(file, spec, manifest.pool_of(spec))


def plan_fits(job: GpuJob) -> bool:
    """Return whether the operator accepts the job, with its sizes known."""
    try:
        plan = resolve(job.spec, job.pool)
    except RefusedError:
        return False
    return plan.host is not None and plan.engine_memory is not None


def engines_built(jobs: list[GpuJob]) -> list[bool]:
    """Return for each job whether SGLang builds its engine with the weights that the planner counts."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "support.ranks.engine_cases"],
            env=os.environ
            | environment(Path(folder))
            | {"PYTHONPATH": os.pathsep.join([str(REPO / "tests"), *sys.path])},
            input=json.dumps(list(map(_case, jobs))),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"SGLang's layers were not built: {done.stderr[-2000:]}")
    return [agrees(result) for result in json.loads(done.stdout.splitlines()[-1])]


def agrees(result: dict[str, Any]) -> bool:
    """Return whether both give bytes, and the same ones; text says why one refuses."""
    planned, built = result["planner"], result["sglang"]
    if not isinstance(planned, int) or not isinstance(built, int):
        return False
    return abs(planned - built) <= _SCALES * built


def _case(job: GpuJob) -> dict[str, Any]:
    name = job.spec.model.architecture
    assert name is not None
    hf = architecture(name)
    hf = hf | {"num_hidden_layers": _LAYERS, "num_nextn_predict_layers": 0}
    shape = engine_shape(job.pool.engine)
    sizes = {field: getattr(shape, field) for field in shape.__slots__}
    return {"name": name, "hf": hf, "shape": sizes}
