"""Prompts of a job and rewards of its responses."""

import json
from typing import Annotated, Literal

from pydantic import Field, field_validator

from grpo_operator.api.base import Model, Path, ShortString
from grpo_operator.api.rules import Rule
from grpo_operator.api.v1alpha1.volumes import VolumeSpec

GYM = "reasoning-gym:"
SOURCE_PATTERN = (
    r"^(reasoning-gym:[a-z0-9_]+(\?[a-z0-9_=&.-]+)?|(/|[a-z][a-z0-9+]*://).+\.(parquet|jsonl|json))$"
)
Function = Annotated[
    str,
    Field(
        min_length=3, max_length=253, pattern=r"^(/[^:]+\.py|[A-Za-z_][A-Za-z0-9_.]*):[A-Za-z_][A-Za-z0-9_]*$"
    ),
]


_DATA_RULES: tuple[Rule["DataSpec"], ...] = (
    Rule(
        "!has(self.volume) || !self.train.startsWith('/')"
        " || self.train.startsWith(self.volume.mountPath + '/')",
        "data.train must lie in data.volume.mountPath: correct one of the two",
        lambda data: (
            data.volume is None
            or not data.train.startswith("/")
            or data.train.startswith(data.volume.mount_path + "/")
        ),
    ),
)


class DataSpec(Model):
    """Prompts: their source, their form and the length limits."""

    rules = _DATA_RULES
    train: str = Field(
        min_length=1,
        max_length=1024,
        pattern=SOURCE_PATTERN,
        description="reasoning-gym:TASK?key=value&...: generated prompts, reproducible by seed, with a "
        "built-in verifier; or the path, glob pattern or fsspec URL of Parquet or JSON-lines files, which "
        "need spec.reward",
    )
    volume: VolumeSpec | None = Field(
        None, description="volume with train and the job's Python files; mounted into the controller"
    )
    prompt_key: ShortString = Field("prompt", description="column with the prompts, as text or chat messages")
    answer_key: ShortString = Field(
        "answer",
        description="column passed to the reward function as ground_truth; a dot selects a nested column, "
        "such as reward_model.ground_truth in verl's files",
    )
    raw: bool = Field(
        False,
        description="true: pass text prompts to the model unchanged. false: wrap each in the model's chat "
        "template as a user message",
    )
    chat_template_kwargs: dict[str, str] = Field(
        default_factory=dict,
        max_length=16,
        description="additional variables of the chat template; values are JSON, such as enable_thinking: "
        "'false' (verl: apply_chat_template_kwargs)",
    )
    filter: Function | None = Field(
        None,
        description="Python function row -> bool that returns true for rows to keep, as module:function or "
        "file.py:function",
    )
    order: Function | None = Field(
        None,
        description="Python function (rows, epoch, seed) -> order of the rows, for example for a curriculum; "
        "default: shuffled",
    )
    prompt_length: int = Field(
        512, ge=8, le=1048576, description="longest prompt, in tokens; rows with longer prompts are skipped"
    )
    response_length: int = Field(512, ge=1, le=1048576, description="longest response, in tokens")
    train_batch_size: int = Field(128, ge=1, le=65536, description="prompts per training step")
    max_refused_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of a step's prompts, but at least one prompt, that engines may refuse; refused "
        "prompts are dropped with a record and replaced by the next ones, and more of them end the job",
    )

    @field_validator("chat_template_kwargs")
    @classmethod
    def _values_are_json(cls, variables: dict[str, str]) -> dict[str, str]:
        for name, value in variables.items():
            try:
                json.loads(value)
            except ValueError as error:
                raise ValueError(f'{name}={value!r} is not JSON: write false, 3 or "text"') from error
        return variables

    @property
    def total_length(self) -> int:
        """Return the largest number of tokens of a prompt and its response together."""
        return self.prompt_length + self.response_length


class RewardModelSpec(Model):
    """A reward model: a sequence classifier with one label that runs frozen on the trainer's ranks.

    It must have a supported architecture and the policy's vocabulary.
    """

    path: Path = Field(
        pattern=r"^/.+$", description="Hugging Face model directory; its weights must include score.weight"
    )
    weight: float = Field(1.0, gt=0, le=1000, description="factor of the model's score in the reward")


_REWARD_RULES: tuple[Rule["RewardSpec"], ...] = (
    Rule(
        "[has(self.function), has(self.url), has(self.builtin)].filter(given, given).size() <= 1",
        "set at most one of function, builtin and url",
        lambda reward: [reward.function, reward.url, reward.builtin].count(None) >= 2,
    ),
    Rule(
        "has(self.function) || has(self.url) || has(self.builtin) || has(self.model)",
        "set function, builtin, url or model",
        lambda reward: bool(reward.function or reward.url or reward.builtin or reward.model),
    ),
)


class RewardSpec(Model):
    """Reward of the responses, in place of a task's own verifier.

    The reward is the score of function, builtin or url, or of a reward model, or the sum of both.
    """

    rules = _REWARD_RULES
    model: RewardModelSpec | None = None
    function: Function | None = Field(
        None,
        description="Python function with the signature of verl, TRL or verifiers, such as "
        "compute_score(data_source, solution_str, ground_truth, extra_info); runs in separate processes",
    )
    builtin: Literal["math", "code", "json", "choice"] | None = Field(
        None,
        description="math: the last formula equals ground_truth (math-verify). code: the last code block "
        "passes the tests in ground_truth. json: the response is JSON that matches ground_truth, a schema "
        "or a value. choice: the selected letter equals ground_truth",
    )
    url: str | None = Field(
        None,
        max_length=1024,
        pattern=r"^https?://.+$",
        description="HTTP verifier: receives the same arguments by POST as JSON {items: [...]} and returns "
        "{scores: [...]}",
    )
    timeout_seconds: int = Field(
        30,
        ge=1,
        le=3600,
        description="time limit for scoring one response, in seconds; a function that exceeds it gives 0",
    )
    memory_megabytes: int = Field(
        2048,
        ge=64,
        le=1048576,
        description="memory limit of a process that runs the function, in MiB; exceeding it gives 0",
    )
    sandbox: Literal["required", "bestEffort"] = Field(
        "required",
        description="boundary of programs that builtin: code runs, by Landlock and seccomp. required: the "
        "job fails where the controller's node has no Landlock. bestEffort: programs run there without it, "
        "and can read the files of the controller's pod",
    )
    workers: int = Field(
        4,
        ge=1,
        le=1024,
        description="responses that a function scores at the same time; with url, requests of a group each. "
        "Responses are decoded by as many processes, but not more than the controller's pod has CPUs",
    )
    on_failure: Literal["zero", "stop"] = Field(
        "zero",
        description="action when the function raises, hangs or crashes. zero: reward 0. stop: the job fails. "
        "A function whose module cannot be loaded always fails the job",
    )
