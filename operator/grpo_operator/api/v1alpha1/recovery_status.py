"""Status of the recoveries of a job."""

from pydantic import Field

from grpo_operator.api.base import Model


class RecoveryStatus(Model):
    """Duration of the last recovery, from the fault until the interrupted step was finished."""

    cause: str = Field(max_length=32, description="cause: job, infrastructure, controller or rollback")
    step: int = Field(description="number of the step that the fault interrupted")
    seconds: str = Field(max_length=32, description="duration in seconds")
    parts: dict[str, str] = Field(
        default_factory=dict,
        max_length=16,
        description="seconds by part: detect (until the fault was reported; without a controller: until the "
        "next one), stop (of the gang), start (back-off, missing pods, ranks), load (state of the ranks, "
        "weights of the engines) and replay (until the interrupted step was finished, that step included)",
    )
