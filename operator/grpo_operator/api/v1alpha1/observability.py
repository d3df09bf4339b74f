"""What a job shows of itself besides its status."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_operator.api.base import Model, ShortString


class ProfileSpec(Model):
    """Traces of some steps, written to the store's ``profile`` folder."""

    cel = (("self.stepStart <= self.stepEnd", "stepStart must not exceed stepEnd"),)
    tool: Literal["torch", "nsight"] = Field(
        "torch",
        description="torch.profiler, or Nsight Systems: the ranks then run under nsys, which their image "
        "must hold",
    )
    ranks: list[Annotated[int, Field(ge=0, le=65535)]] = Field(
        default_factory=lambda: [0], min_length=1, max_length=64, description="trainer ranks to trace"
    )
    step_start: int = Field(ge=1, le=10**7, description="first step to trace")
    step_end: int = Field(ge=1, le=10**7, description="last step to trace")

    @model_validator(mode="after")
    def _check(self) -> "ProfileSpec":
        if self.step_start > self.step_end:
            raise ValueError(f"stepStart ({self.step_start}) must not exceed stepEnd ({self.step_end})")
        return self


class WandbSpec(Model):
    """A run of Weights & Biases. Its key is WANDB_API_KEY in the controller's environment
    (controller.podTemplate)."""

    project: ShortString = Field(description="project of the run")
    entity: ShortString | None = Field(None, description="user or team; default: the key's own")
    offline: bool = Field(
        False, description="write the run to the store's wandb folder, for `wandb sync` from elsewhere"
    )


class MlflowSpec(Model):
    """A run of MLflow."""

    tracking_uri: str = Field(
        min_length=1,
        max_length=1024,
        description="of the tracking server: http(s)://HOST..., or databricks",
    )
    experiment: ShortString = Field("grpo", description="name; made when it is not there")


class ThresholdSpec(Model):
    """What is normal for a metric; an alert fires when it stays outside."""

    cel = (("has(self.minimum) || has(self.maximum)", "set minimum or maximum"),)
    metric: ShortString = Field(description="name as in metrics.jsonl")
    minimum: float | None = Field(None, ge=-1e15, le=1e15, description="lowest normal value")
    maximum: float | None = Field(None, ge=-1e15, le=1e15, description="highest normal value")

    @model_validator(mode="after")
    def _check(self) -> "ThresholdSpec":
        if self.minimum is None and self.maximum is None:
            raise ValueError(f"metric {self.metric}: set minimum or maximum")
        return self


def _normal() -> list[ThresholdSpec]:
    return [
        ThresholdSpec(metric="actor/kl_loss", maximum=0.1),
        ThresholdSpec(metric="actor/ppo_kl", maximum=0.1),
        ThresholdSpec(metric="train/train_rollout_logprob_abs_diff", maximum=0.1),
        ThresholdSpec(metric="profile/communication_share", maximum=0.1),
    ]


class ObservabilitySpec(Model):
    """Where metrics go besides status, and which values are normal."""

    tensorboard: bool = Field(True, description="write TensorBoard files beside the job's metrics.jsonl")
    wandb: WandbSpec | None = None
    mlflow: MlflowSpec | None = None
    thresholds: list[ThresholdSpec] = Field(
        default_factory=_normal, max_length=64, description="bounds that the chart's alerts watch"
    )
    profile: ProfileSpec | None = None
