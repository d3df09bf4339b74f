"""What the operator mounts into the job's pods as ``/etc/grpo/job.json``."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec

JOB_FILE = Path(os.environ.get("GRPO_JOB_FILE", "/etc/grpo/job.json"))


@dataclass(frozen=True, slots=True)
class JobConfig:
    """The validated spec and the names that the operator chose. ``writer``: what this job calls
    itself to the engines' agents. ``fp8``: the form of the weights in the engines."""

    name: str
    namespace: str
    spec: GRPOJobSpec
    rollout_service: str
    min_available: int
    fp8: bool
    writer: str
    store: Path


def load_job_config(path: Path = JOB_FILE) -> JobConfig:
    """Read and validate the job file. Raises pydantic.ValidationError that names the field."""
    data = json.loads(path.read_text())
    return JobConfig(
        name=data["name"],
        namespace=data["namespace"],
        spec=GRPOJobSpec.model_validate(data["spec"]),
        rollout_service=data["rolloutService"],
        min_available=data["minAvailable"],
        fp8=data["fp8"],
        writer=data["writer"],
        store=Path(data["store"]),
    )
