"""GPU time of a job in its status."""

from pydantic import Field

from grpo_operator.api.base import Model


class GoodputStatus(Model):
    """GPU time of the run since its first controller started. On CPUs each rank counts as a GPU."""

    effective: str | None = Field(
        None,
        max_length=16,
        description="share of the GPU time that was neither idle nor spent on repeated steps or held as a "
        "spare, in percent",
    )
    gpu_seconds: dict[str, int] = Field(
        default_factory=dict,
        max_length=16,
        description="GPU seconds by use: generate, train, sync, wait (trainers, for samples or the store), "
        "bubble (engines, for new weights), replayed, idle and spare (of spare training pods); they add up "
        "to all GPUs x wall time",
    )
    lost_gpu_seconds: dict[str, int] = Field(
        default_factory=dict,
        max_length=16,
        description="replayed and idle GPU seconds by cause: start, job, infrastructure, controller (time "
        "without one), rollback, engines (parked trainers) and suspended",
    )
    cost: str | None = Field(
        None, max_length=32, description="price of the GPU time by observability.pricePerGpuHour"
    )
    cost_per_step: str | None = Field(None, max_length=32, description="cost divided by finished steps")
