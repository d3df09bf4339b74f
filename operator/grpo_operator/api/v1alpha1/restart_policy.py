"""Restarts of a job's training gang: their limits, and the time after which a gang counts as hanging."""

from pydantic import Field

from grpo_operator.api.base import Model

HANG_SECONDS = 240  # of hangSeconds: the smallest default


class RestartPolicySpec(Model):
    """Limits on restarts, after which the job fails."""

    max_restarts: int = Field(
        10, ge=0, le=10**6, description="largest number of restarts after errors of the job itself"
    )
    max_same_failures: int = Field(
        3,
        ge=1,
        le=1000,
        description="number of errors of the job itself with the same cause after which the job fails",
    )
    backoff_seconds: int = Field(
        5,
        ge=0,
        le=3600,
        description="delay before the second restart in a row, in seconds; doubles with each further one, "
        "whatever the cause, up to 5 minutes; halves with each step that is finished for the first time",
    )
    hang_seconds: int | None = Field(
        None,
        ge=30,
        le=86400,
        description="seconds without any progress of the trainer ranks (micro-batches, bytes read or "
        "written, buckets sent, collectives) after which the gang counts as hanging and is restarted. The "
        "duration of a call has no limit. Default: eight times the estimated passes of one micro-batch, at "
        "least 240",
    )

    @property
    def hang_limit(self) -> int:
        """Return ``hangSeconds``, or its smallest default where no plan has set it."""
        return self.hang_seconds or HANG_SECONDS
