"""Divergence of the training: metrics beyond limits that the user names."""

from typing import Literal

from pydantic import Field

from grpo_operator.api.base import Model
from grpo_operator.api.v1alpha1.observability import ThresholdSpec


class DivergenceSpec(Model):
    """Limits of metrics beyond which the training counts as diverged."""

    limits: list[ThresholdSpec] = Field(
        min_length=1,
        max_length=16,
        description="range of each watched metric, such as actor/ppo_kl, actor/grad_norm or"
        " critic/score/mean; a value that is no number is outside",
    )
    steps: int = Field(
        3,
        ge=1,
        le=10**4,
        description="number of steps in a row in which the same metric must be outside of its range",
    )
    on_divergence: Literal["stop", "rollback"] = Field(
        "stop",
        description="stop: the job fails with the reason Diverged, and its checkpoints stay; rollback: the"
        " job goes back to the newest checkpoint from before the first of these steps, and on with other"
        " prompts, those that were drawn since are skipped",
    )
    rollbacks: int = Field(
        1,
        ge=1,
        le=100,
        description="for onDivergence: rollback: largest number of rollbacks of the job, those of"
        " validation.onRegression included, after which it ends as with stop; resuming the job allows as many"
        " again",
    )
