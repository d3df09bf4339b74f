"""The export in a job's status that was requested by annotation."""

from enum import StrEnum

from pydantic import Field

from grpo_operator.api.base import LONGEST_MESSAGE, Model
from grpo_operator.api.v1alpha1.export_request import LONGEST_REQUEST


class ExportState(StrEnum):
    """State of a requested export."""

    RUNNING = "Running"
    WRITTEN = "Written"
    FAILED = "Failed"


class ExportStatus(Model):
    """The last export of a checkpoint that was requested by annotation."""

    request: str = Field(
        max_length=LONGEST_REQUEST,
        description="value of the annotation rl.grpo.dev/export; only another one asks for another export",
    )
    state: ExportState = Field(description="Running, Written or Failed")
    step: int | None = Field(None, description="step of the checkpoint")
    path: str | None = Field(
        None, max_length=1024, description="directory of the export inside the pods, or its URI"
    )
    message: str | None = Field(
        None, max_length=LONGEST_MESSAGE, description="reason of a failure, or what the export waits for"
    )
    requested_at: str = Field(max_length=32, description="time of the request (RFC 3339, UTC)")
    finished_at: str | None = Field(
        None, max_length=32, description="time of the end or of the failure (RFC 3339, UTC)"
    )
