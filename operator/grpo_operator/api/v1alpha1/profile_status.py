"""Profiles in a job's status that were requested by annotation."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from grpo_operator.api.base import LONGEST_MESSAGE, Model
from grpo_operator.api.v1alpha1.profile_request import LONGEST_REQUEST, ProfileTarget, ProfileTool

MOST_PROFILES = 10  # in a job's status, the newest ones
MOST_FILES = 64  # of one profile


class ProfileState(StrEnum):
    """State of a requested profile."""

    REQUESTED = "Requested"
    RECORDING = "Recording"
    WRITTEN = "Written"
    FAILED = "Failed"


class ProfileStatus(Model):
    """One profile that was requested by annotation."""

    id: str = Field(max_length=8, description="identifies the request; the name of its folder")
    request: str = Field(max_length=LONGEST_REQUEST, description="value of the annotation")
    tool: ProfileTool | None = Field(None, description="torch, nsight or py-spy")
    target: ProfileTarget | None = Field(None, description="trainer, engines or controller")
    state: ProfileState = Field(description="Requested, Recording, Written or Failed")
    path: str | None = Field(None, max_length=1024, description="directory of the files, inside the pods")
    files: list[Annotated[str, Field(max_length=253)]] | None = Field(
        None, max_length=MOST_FILES, description="names of the files in that directory"
    )
    message: str | None = Field(
        None, max_length=LONGEST_MESSAGE, description="reason of a failure, or what the request waits for"
    )
    requested_at: str = Field(max_length=32, description="time of the request (RFC 3339, UTC)")
    started_at: str | None = Field(
        None, max_length=32, description="time when recording began (RFC 3339, UTC)"
    )
    finished_at: str | None = Field(
        None,
        max_length=32,
        description="time of the end or of the failure (RFC 3339, UTC)",
    )
