"""Validation of a job's weights on prompts that it does not train on."""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from grpo_operator.api.base import Model
from grpo_operator.api.rules import Rule
from grpo_operator.api.v1alpha1.data import GYM, SOURCE_PATTERN

if TYPE_CHECKING:
    from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec

SetName = Annotated[str, Field(min_length=1, max_length=40, pattern=r"^[a-z0-9]([-a-z0-9._]*[a-z0-9])?$")]

_VALIDATION_RULES: tuple[Rule["ValidationSpec"], ...] = (
    Rule(
        "self.sets.all(one, self.sets.exists_one(other, other.name == one.name))",
        "validation.sets have the same name twice: rename one of them",
        lambda spec: len({one.name for one in spec.sets}) == len(spec.sets),
    ),
    Rule(
        "self.samplesPerPrompt == 1 || self.temperature > 0.0",
        "validation.samplesPerPrompt above 1 needs validation.temperature above 0: without sampling, all"
        " responses to a prompt are the same",
        lambda spec: spec.samples_per_prompt == 1 or spec.temperature > 0,
    ),
    Rule(
        "!has(self.passAt) || self.passAt.all(k, k <= self.samplesPerPrompt)",
        "validation.passAt has a number above validation.samplesPerPrompt: raise samplesPerPrompt, or remove"
        " the number: pass@k is estimated from at least k responses to a prompt",
        lambda spec: all(k <= spec.samples_per_prompt for k in spec.pass_at),
    ),
    Rule(
        "!has(self.passAt) || self.passAt.all(k, self.passAt.exists_one(other, other == k))",
        "validation.passAt has a number twice: remove one of them",
        lambda spec: len(set(spec.pass_at)) == len(spec.pass_at),
    ),
    Rule(
        "!has(self.keepBest) || self.sets.exists(one, one.name == self.keepBest)",
        "validation.keepBest must be the name of one of validation.sets: correct it",
        lambda spec: spec.keep_best is None or spec.keep_best in {one.name for one in spec.sets},
    ),
    Rule(
        "self.onRegression == 'continue' || has(self.keepBest)",
        "validation.onRegression: stop and rollback need validation.keepBest: set it to the name of the set"
        " whose mean score is watched",
        lambda spec: spec.on_regression == "continue" or spec.keep_best is not None,
    ),
)


class ValidationSetSpec(Model):
    """Prompts of one kind, whose scores are reported together."""

    name: SetName = Field(description="name in the metrics, such as val/NAME/score/mean")
    data: str = Field(
        min_length=1,
        max_length=1024,
        pattern=SOURCE_PATTERN,
        description="source of the prompts, as in data.train; columns, template and length limit are those "
        "of data, but data.filter and data.order do not apply",
    )
    prompts: int | None = Field(
        None,
        ge=1,
        le=10**6,
        description="number of prompts, the same ones in each validation; default: all rows of files, and "
        "256 of a source that generates prompts",
    )


class ValidationSpec(Model):
    """Validation of weight versions by the job's reward, without training on the responses.

    Engines that have GPUs of their own generate the responses while the trainers compute.
    """

    rules = _VALIDATION_RULES
    sets: list[ValidationSetSpec] = Field(min_length=1, max_length=16, description="prompts")
    every_steps: int = Field(
        20, ge=1, le=10**6, description="steps from one validation to the next; the last step is always one"
    )
    before_training: bool = Field(True, description="true: validate the initial weights too")
    samples_per_prompt: int = Field(
        1, ge=1, le=1024, description="responses to each prompt; pass@k is estimated from all of them"
    )
    pass_at: list[Annotated[int, Field(ge=1, le=1024)]] = Field(
        default_factory=list,
        max_length=12,
        description="numbers k for which pass@k is reported, each at most samplesPerPrompt; []: powers of two"
        " up to samplesPerPrompt, and samplesPerPrompt",
    )
    temperature: float = Field(
        0.0,
        ge=0,
        le=2,
        description="sampling temperature; 0: greedy, so that each token is the most likely one, which needs"
        " samplesPerPrompt 1",
    )
    response_length: int | None = Field(
        None,
        ge=1,
        le=1048576,
        description="longest response, in tokens; default: data.responseLength",
    )
    engine_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the serving engines that respond, rounded up; below 1, the others have room for"
        " the samples of the next step with staleness.maxVersionLag 1",
    )
    keep_best: SetName | None = Field(
        None,
        description="name of a set: keep the checkpoint with its best mean score, beside those of "
        "checkpoint.keep; default: only the newest checkpoints are kept",
    )
    pass_score: float = Field(
        1.0, ge=-1e9, le=1e9, description="score from which a response counts as correct, for pass@k"
    )
    on_regression: Literal["continue", "stop", "rollback"] = Field(
        "continue",
        description="what happens when the mean score of the set of keepBest has fallen; stop: the job fails"
        " with the reason ValidationRegressed, and its best checkpoint stays; rollback: the job goes back to"
        " that checkpoint and on with other prompts, those that were drawn since are skipped",
    )
    rollbacks: int = Field(
        1,
        ge=1,
        le=100,
        description="for onRegression: rollback: largest number of rollbacks, after which the job ends as"
        " with stop; resuming the job allows as many again",
    )
    regression_margin: float = Field(
        0.05,
        ge=0,
        le=1e9,
        description="for onRegression: a score has fallen if it is lower than the best one before it by more"
        " than this, in units of the score",
    )
    regression_validations: int = Field(
        3,
        ge=1,
        le=1000,
        description="for onRegression: number of validations in a row whose scores must have fallen",
    )


# Of the whole job.
VALIDATION_RULES: tuple[Rule["GRPOJobSpec"], ...] = (
    Rule(
        "!has(self.validation) || !has(self.validation.responseLength) || !has(self.rollout.template)"
        " || self.data.promptLength + self.validation.responseLength"
        " <= self.rollout.template.engine.contextLength",
        "data.promptLength + validation.responseLength must fit in rollout.template.engine.contextLength",
        lambda job: (
            job.validation is None
            or job.rollout.template is None
            or job.data.prompt_length + (job.validation.response_length or 0)
            <= job.rollout.template.engine.context_length
        ),
    ),
    Rule(
        "!has(self.validation) || has(self.reward)"
        " || self.validation.sets.all(one, one.data.startsWith('reasoning-gym:'))",
        "validation.sets from files need a reward: set reward.function, reward.builtin or reward.url",
        lambda job: (
            job.validation is None
            or job.reward is not None
            or all(one.data.startswith(GYM) for one in job.validation.sets)
        ),
    ),
    Rule(
        "!has(self.validation) || !has(self.reward) || has(self.reward.function)"
        " || has(self.reward.builtin) || has(self.reward.url)",
        "validation needs reward.function, reward.builtin or reward.url: the reward model runs on the"
        " trainers, which see no response of a validation",
        lambda job: (
            job.validation is None
            or job.reward is None
            or bool(job.reward.function or job.reward.builtin or job.reward.url)
        ),
    ),
    Rule(
        "!has(self.validation) || !has(self.data.volume)"
        " || self.validation.sets.all(one, !one.data.startsWith('/')"
        " || one.data.startsWith(self.data.volume.mountPath + '/'))",
        "paths in validation.sets must lie in data.volume.mountPath: correct them",
        lambda job: (
            job.validation is None
            or job.data.volume is None
            or all(
                not one.data.startswith("/") or one.data.startswith(job.data.volume.mount_path + "/")
                for one in job.validation.sets
            )
        ),
    ),
)
