"""Status of the checkpoints of a job: in the store, and in the memory of its pods."""

from pydantic import Field

from grpo_operator.api.base import LONGEST_MESSAGE, Model


class CheckpointStatus(Model):
    """Newest complete checkpoint."""

    step: int = Field(description="last finished step in the checkpoint")
    location: str = Field(max_length=1024, description="directory inside the pods")
    complete: bool = Field(description="true if the commit marker exists")
    completed_at: str | None = Field(
        None,
        max_length=32,
        description="time at which it was complete, or was first seen by the operator (RFC 3339, UTC)",
    )


class MemoryCopiesStatus(Model):
    """Copies of the training state in the memory of the training pods; see checkpoint.memory."""

    step: int | None = Field(
        None, description="step of the newest complete copy; not set while none is known"
    )
    failures: int = Field(
        0,
        description="number of failures since the last copy that is complete in all of its pods: copies that "
        "failed or are missing in a pod, and checkpoints in the store that overtook a copy",
    )
    message: str | None = Field(
        None, max_length=LONGEST_MESSAGE, description="reason of the last of these failures"
    )
