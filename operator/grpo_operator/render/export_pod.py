"""Pod that exports a checkpoint of a job as a model (pure). It runs once; its end is the answer."""

import json
import shlex
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.base import Resources
from grpo_operator.api.v1alpha1.export_request import parse_request
from grpo_operator.api.v1alpha1.export_status import ExportStatus
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.plan.planner.host_memory import export_memory
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.render.program_pod import Program, program_pod
from grpo_operator.settings import OperatorSettings


def export_pod(
    job: dict[str, Any], spec: GRPOJobSpec, export: ExportStatus, settings: OperatorSettings
) -> dict[str, Any]:
    """Return the pod of a request that is in the job's status."""
    request, step = parse_request(export.request), export.step or 0
    arguments = {
        "folder": names.job_store(job["metadata"]["namespace"], names.writer(job)),
        "store": spec.checkpoint.store.wire(),
        "model": spec.model.wire(),
        "step": step,
        "quantization": request.quantization,
        "name": request.directory(step),
    }
    config = spec.model.config()
    memory = export_memory(ModelShape.from_hf(config) if config else None)
    program = Program(
        names.EXPORT,
        names.export_pod(job, export.request),
        f"grpo_worker.megatron.export.offline {shlex.quote(json.dumps(arguments))}",
        Resources(cpu="100m", memory=f"{-(-memory // 2**20)}Mi"),
        "Never",
    )
    return program_pod(job, spec, settings, program)
