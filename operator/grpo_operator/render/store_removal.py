"""Pod that removes the folder of a deleted job from its store (pure).

Kubelet starts its process again, with a back-off, until it has succeeded.
"""

import json
import shlex
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.base import Resources
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.render.program_pod import Program, program_pod
from grpo_operator.settings import OperatorSettings

_RESOURCES = Resources(cpu="100m", memory="512Mi")


def removal_pod(job: dict[str, Any], spec: GRPOJobSpec, settings: OperatorSettings) -> dict[str, Any]:
    """Return the pod."""
    folder = names.job_store(job["metadata"]["namespace"], names.writer(job))
    arguments = shlex.join((folder, json.dumps(spec.checkpoint.store.wire())))
    program = Program(
        names.STORE_REMOVAL,
        names.store_removal(job),
        f"grpo_worker.checkpointing.removal {arguments}",
        _RESOURCES,
        "OnFailure",
        whole_store=True,
    )
    return program_pod(job, spec, settings, program)
