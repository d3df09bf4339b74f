"""The job's configuration file, and limits that follow from it."""

import os
from pathlib import Path

from grpo_operator.api.job_config import JobConfig
from grpo_operator.api.v1alpha1.model import WeightSyncSpec

JOB_FILE = Path(os.environ.get("GRPO_JOB_FILE", "/etc/grpo/job.json"))
# Updates of one engine, one after the other, that must fit in ``pool_timeout``: an engine that fails or
# restarts during an update is updated again, and the job waits for it if ``minAvailable`` needs it.
_UPDATES_OF_ONE_ENGINE = 4


def load_job_config(path: Path = JOB_FILE) -> JobConfig:
    """Read and validate the job file. Raises pydantic.ValidationError that names the field."""
    return JobConfig.model_validate_json(path.read_bytes())


def pool_timeout(settings: WeightSyncSpec) -> float:
    """Return the seconds in which ``minAvailable`` engines must serve a new version.

    ``timeoutSeconds`` limits one update of one engine.
    """
    return float(_UPDATES_OF_ONE_ENGINE * settings.patience)
