"""A job's ConfigMap and its own RolloutPool (pure)."""

import json
from pathlib import Path
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.base import API_VERSION
from grpo_operator.api.job_config import JobConfig
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.api.weight_path import WeightPath
from grpo_operator.plan.weight_path import job_weight_path
from grpo_operator.render.metadata import metadata


def job_config_map(
    job: dict[str, Any],
    spec: GRPOJobSpec,
    rollout_service: str,
    pool: RolloutTemplate,
    path: WeightPath | None = None,
    *,
    fork_from: str | None = None,
    resumes: int = 0,
    accepted: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the ConfigMap with job.json. ``rollout_service``: name of the service of ``pool``.

    ``path``: that of the weights; None: as this operator chooses it. ``fork_from``, ``resumes``: see
    JobConfig. ``accepted``: form of the spec that is written; None: that of this release.
    """
    meta = job["metadata"]
    name, namespace = meta["name"], meta["namespace"]
    config = JobConfig(
        name=name,
        namespace=namespace,
        # The operator sends changes of ``suspend`` over HTTP. In the file, they would only rewrite it.
        spec=spec.model_copy(update={"suspend": False}),
        rollout_service=f"{rollout_service}.{namespace}.svc.cluster.local",
        min_available=pool.min_available,
        engines=pool.replicas,
        engine_gpus=pool.engine.tensor_parallel,
        max_running_requests=pool.engine.max_running_requests,
        fp8=pool.engine.quantization == "fp8-block128",
        weight_path=path or job_weight_path(spec, pool),
        writer=names.writer(job),
        store=Path(names.job_store(namespace, names.writer(job))),
        fork_from=fork_from,
        resumes=resumes,
    )
    content = config.wire() | ({} if accepted is None else {"spec": accepted})
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, names.job_config(name)),
        "data": {"job.json": json.dumps(content, sort_keys=True)},
    }


def owned_pool_spec(spec: GRPOJobSpec) -> dict[str, Any] | None:
    """Return the spec of the RolloutPool of the job's own engines; None if it uses a shared one."""
    template = spec.rollout.template
    return template.wire() | {"model": spec.model.wire()} if template else None


def owned_pool(job: dict[str, Any], spec: dict[str, Any]) -> dict[str, Any]:
    """Return the RolloutPool of the job's own engines, which shows their status and can be scaled."""
    return {
        "apiVersion": API_VERSION,
        "kind": "RolloutPool",
        "metadata": metadata(job, names.rollout_pool(job["metadata"]["name"])),
        "spec": spec,
    }
