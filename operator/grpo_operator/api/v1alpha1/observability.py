"""Metrics, alerts and profiles of a job."""

from typing import Annotated, Literal

from pydantic import Field

from grpo_operator.api.base import Model, ShortString
from grpo_operator.api.rules import Rule

_PROFILE_RULES: tuple[Rule["ProfileSpec"], ...] = (
    Rule(
        "has(self.stepStart) == has(self.stepEnd)",
        "set stepStart and stepEnd, or neither",
        lambda profile: (profile.step_start is None) == (profile.step_end is None),
    ),
    Rule(
        "has(self.stepStart) || self.tool == 'nsight'",
        "set stepStart and stepEnd: torch needs no spec to trace a running job, see the annotation "
        "rl.grpo.dev/profile",
        lambda profile: profile.step_start is not None or profile.tool == "nsight",
    ),
    Rule(
        "!has(self.stepStart) || !has(self.stepEnd) || self.stepStart <= self.stepEnd",
        "stepStart must not exceed stepEnd",
        lambda profile: not profile.steps or profile.steps[0] <= profile.steps[1],
    ),
)


class ProfileSpec(Model):
    """Traces of selected steps, written to the ``profile`` folder of the store."""

    rules = _PROFILE_RULES
    tool: Literal["torch", "nsight"] = Field(
        "torch",
        description="torch: torch.profiler. nsight: Nsight Systems; the ranks run under nsys, which the "
        "trainer image must contain",
    )
    ranks: list[Annotated[int, Field(ge=0, le=65535)]] = Field(
        default_factory=lambda: [0], min_length=1, max_length=64, description="trainer ranks to trace"
    )
    step_start: int | None = Field(
        None,
        ge=1,
        le=10**7,
        description="first step to trace; default, with nsight only: none, until the annotation "
        "rl.grpo.dev/profile asks for one",
    )
    step_end: int | None = Field(None, ge=1, le=10**7, description="last step to trace")

    @property
    def steps(self) -> tuple[int, int] | None:
        """Return the first and the last step to trace; None: only what the annotation asks for."""
        if self.step_start is None or self.step_end is None:
            return None
        return self.step_start, self.step_end


class WandbSpec(Model):
    """A Weights & Biases run.

    The controller reads the API key from the environment variable WANDB_API_KEY: set it in
    controller.podTemplate.
    """

    project: ShortString = Field(description="W&B project")
    entity: ShortString | None = Field(
        None, description="W&B user or team; default: the owner of the API key"
    )
    offline: bool = Field(
        False, description="write the run to the store's wandb folder, to be uploaded later with `wandb sync`"
    )


class MlflowSpec(Model):
    """An MLflow run."""

    tracking_uri: str = Field(
        min_length=1,
        max_length=1024,
        description="address of the tracking server: http(s)://HOST..., or databricks",
    )
    experiment: ShortString = Field(
        "grpo", description="name of the experiment; created if it does not exist"
    )


_TRACKIO_RULES: tuple[Rule["TrackioSpec"], ...] = (
    Rule(
        "!has(self.space) || !has(self.serverUrl)",
        "set space or serverUrl, or neither",
        lambda trackio: trackio.space is None or trackio.server_url is None,
    ),
)


class TrackioSpec(Model):
    """A trackio run, in the store's ``trackio`` folder unless space or serverUrl is set.

    The images have no trackio: add it to the image of the job.
    """

    rules = _TRACKIO_RULES
    project: ShortString = Field("grpo", description="trackio project")
    space: ShortString | None = Field(
        None,
        description="Hugging Face Space (USER/NAME) that gets the run; one that does not exist is created, "
        "private. The controller reads the token from the environment variable HF_TOKEN: set it in "
        "controller.podTemplate",
    )
    server_url: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        pattern=r"^https?://[^?#@]+$",
        description="address of a trackio server that gets the run. The controller reads the token from the "
        "environment variable TRACKIO_WRITE_TOKEN: set it in controller.podTemplate",
    )


class TrackersSpec(Model):
    """Tables of samples and artifacts for TensorBoard, W&B, MLflow and trackio."""

    sample_rows: int = Field(
        8,
        ge=0,
        le=256,
        description="number of samples in the table of a step, and in that of each validation set; 0: no "
        "tables. Long texts are cut in the middle",
    )
    every_steps: int = Field(
        10, ge=1, le=10**6, description="number of steps from one step that has a table to the next"
    )
    artifacts: bool = Field(
        True,
        description="send the run's page, which shows samples, and the addresses of the last and the best "
        "checkpoint when the job has ended",
    )


_THRESHOLD_RULES: tuple[Rule["ThresholdSpec"], ...] = (
    Rule(
        "has(self.minimum) || has(self.maximum)",
        "set minimum or maximum",
        lambda threshold: threshold.minimum is not None or threshold.maximum is not None,
    ),
)


class ThresholdSpec(Model):
    """Normal range of a metric. An alert fires while the metric stays outside of it."""

    rules = _THRESHOLD_RULES
    metric: ShortString = Field(description="name of the metric, as in metrics.jsonl")
    minimum: float | None = Field(None, ge=-1e15, le=1e15, description="lowest normal value")
    maximum: float | None = Field(None, ge=-1e15, le=1e15, description="highest normal value")


def _default_thresholds() -> list[ThresholdSpec]:
    return [
        ThresholdSpec(metric="actor/kl_loss", maximum=0.1),
        ThresholdSpec(metric="actor/ppo_kl", maximum=0.1),
        ThresholdSpec(metric="train/train_rollout_logprob_abs_diff", maximum=0.1),
        ThresholdSpec(metric="profile/communication_share", maximum=0.1),
    ]


class SamplesSpec(Model):
    """Parquet files with the prompts, answers, tokens and scores of steps, in the ``samples`` folder."""

    every_steps: int = Field(
        1,
        ge=0,
        le=10**6,
        description="number of steps from one step whose samples are written to the next; 0: none",
    )
    prompts: int | None = Field(
        None,
        ge=1,
        le=10**6,
        description="number of prompts of a step whose samples are written; default: all",
    )
    validation_prompts: int = Field(
        1000,
        ge=0,
        le=10**6,
        description="number of prompts of each validation set whose samples are written, to the"
        " validation_samples folder, of every validation; 0: none",
    )


class ObservabilitySpec(Model):
    """Destinations of the metrics besides status, normal ranges of metrics, and profiling."""

    tensorboard: bool = Field(True, description="write TensorBoard files beside the job's metrics.jsonl")
    wandb: WandbSpec | None = None
    mlflow: MlflowSpec | None = None
    trackio: TrackioSpec | None = None
    trackers: TrackersSpec = Field(default_factory=TrackersSpec)
    thresholds: list[ThresholdSpec] = Field(
        default_factory=_default_thresholds,
        max_length=64,
        description="normal ranges that the Helm chart's alerts check",
    )
    profile: ProfileSpec | None = None
    samples: SamplesSpec = Field(default_factory=SamplesSpec)
    price_per_gpu_hour: float | None = Field(
        None, ge=0, le=10**6, description="price of one GPU for one hour, in any currency, for status.goodput"
    )
