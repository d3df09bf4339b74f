"""Status of a job that started from another job's checkpoint, or that was resumed after its end."""

from pydantic import Field

from grpo_operator.api.base import LONGEST_MESSAGE, Model

LONGEST_VALUE = 253  # characters of the annotation that are compared


class ResumedFromStatus(Model):
    """Source of a job with checkpoint.resumeFrom."""

    folder: str = Field(
        max_length=1024,
        description="directory inside the pods, or URI, in which the checkpoint is looked for",
    )
    checkpoint: str | None = Field(
        None, max_length=1024, description="directory or URI of the checkpoint that the job has started from"
    )


class ResumptionStatus(Model):
    """Resumptions of a job after its end."""

    times: int = Field(0, description="number of times that the job was resumed after its end")
    at: str | None = Field(None, max_length=32, description="time of the last resumption (RFC 3339, UTC)")
    request: str | None = Field(
        None,
        max_length=LONGEST_VALUE,
        description="last value of the annotation rl.grpo.dev/resume; only another one resumes the job",
    )
    message: str | None = Field(
        None, max_length=LONGEST_MESSAGE, description="why the job was resumed, or stays as it is"
    )
