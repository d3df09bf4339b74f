"""A job's ConfigMap and its own RolloutPool (pure)."""

import json
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.base import API_VERSION
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.render.metadata import metadata
from grpo_operator.render.volumes import STORE_MOUNT


def job_config_map(
    job: dict[str, Any], spec: GRPOJobSpec, rollout_service: str, pool: RolloutTemplate
) -> dict[str, Any]:
    """What the pods read as /etc/grpo/job.json. ``rollout_service``: name of the service of ``pool``."""
    meta = job["metadata"]
    name, namespace = meta["name"], meta["namespace"]
    config = {
        "name": name,
        "namespace": namespace,
        # Suspension is told over HTTP; it must not change the files of the pods.
        "spec": spec.model_copy(update={"suspend": False}).wire(),
        "rolloutService": f"{rollout_service}.{namespace}.svc.cluster.local",
        "minAvailable": pool.min_available,
        "fp8": pool.engine.quantization == "fp8-block128",
        "writer": names.writer(job),
        # The uid keeps a new job of an old name from resuming the old one's checkpoints.
        "store": f"{STORE_MOUNT}/{namespace}-{names.writer(job)}",
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, names.job_config(name)),
        "data": {"job.json": json.dumps(config, sort_keys=True)},
    }


def owned_pool(job: dict[str, Any], spec: GRPOJobSpec, template: RolloutTemplate) -> dict[str, Any]:
    """The RolloutPool that shows, and scales, the job's engines."""
    return {
        "apiVersion": API_VERSION,
        "kind": "RolloutPool",
        "metadata": metadata(job, names.rollout_pool(job["metadata"]["name"])),
        "spec": template.wire() | {"model": spec.model.wire()},
    }
