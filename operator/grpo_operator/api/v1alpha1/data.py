"""What a job trains on, and what judges the answers."""

import json
from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_operator.api.base import Model, Path, ShortString
from grpo_operator.api.v1alpha1.volumes import VolumeSpec, within

GYM = "reasoning-gym:"
_OUTSIDE = "data.train must lie in data.volume.mountPath: correct one of the two"
Function = Annotated[
    str,
    Field(
        min_length=3, max_length=253, pattern=r"^(/[^:]+\.py|[A-Za-z_][A-Za-z0-9_.]*):[A-Za-z_][A-Za-z0-9_]*$"
    ),
]


class DataSpec(Model):
    """Prompts."""

    cel = (
        (
            "!has(self.volume) || !self.train.startsWith('/')"
            " || self.train.startsWith(self.volume.mountPath + '/')",
            _OUTSIDE,
        ),
    )
    train: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^(reasoning-gym:[a-z0-9_]+(\?[a-z0-9_=&.-]+)?|(/|[a-z][a-z0-9+]*://).+\.(parquet|jsonl|json))$",
        description="reasoning-gym:TASK?key=value&...: a seeded, endless task with its own verifier; or "
        "Parquet or JSON-lines files by path, pattern or URL (as fsspec has them), which need spec.reward",
    )
    volume: VolumeSpec | None = Field(
        None, description="what holds train and the Python files of the job; mounted into the controller"
    )
    prompt_key: ShortString = Field("prompt", description="column of the prompts: text, or chat messages")
    answer_key: ShortString = Field(
        "answer",
        description="column that the reward function gets as ground_truth; a dot enters a nested column, as "
        "in reward_model.ground_truth of verl's files",
    )
    raw: bool = Field(
        False,
        description="give text prompts to the model as they are, instead of as a user's message in its chat "
        "template",
    )
    chat_template_kwargs: dict[str, str] = Field(
        default_factory=dict,
        max_length=16,
        description="further variables of the chat template, each as JSON, such as enable_thinking: 'false' "
        "(verl: apply_chat_template_kwargs)",
    )
    filter: Function | None = Field(
        None, description="Python function row -> bool: which to keep (module:function or file.py:function)"
    )
    order: Function | None = Field(
        None,
        description="Python function (rows, epoch, seed) -> order of the rows, for a curriculum; default: "
        "shuffled",
    )
    prompt_length: int = Field(
        512, ge=8, le=1048576, description="longest prompt, in tokens; longer ones of files are left out"
    )
    response_length: int = Field(512, ge=1, le=1048576, description="longest response, in tokens")
    train_batch_size: int = Field(128, ge=1, le=65536, description="prompts of one step")

    @model_validator(mode="after")
    def _check(self) -> "DataSpec":
        local = self.train.startswith("/")
        if self.volume is not None and local and not within(self.train, self.volume.mount_path):
            raise ValueError(f"{_OUTSIDE} (train {self.train}, mountPath {self.volume.mount_path})")
        for name, value in self.chat_template_kwargs.items():
            try:
                json.loads(value)
            except ValueError as error:
                raise ValueError(
                    f'data.chatTemplateKwargs.{name}={value!r} is not JSON: write false, 3 or "text"'
                ) from error
        return self


_AT_MOST = "set at most one of function, builtin and url"
_AT_LEAST = "set function, builtin, url or model"


class RewardModelSpec(Model):
    """A sequence classifier with one label, of a known architecture and with the policy's vocabulary,
    that runs frozen on the trainer's ranks."""

    path: Path = Field(
        pattern=r"^/.+$", description="Hugging Face directory with the weights, score.weight among them"
    )
    weight: float = Field(1.0, gt=0, le=1000, description="factor of its score in the reward")


class RewardSpec(Model):
    """What judges answers instead of a task's own verifier: function, builtin or url, or a model, or the
    sum of one of the three and a model."""

    cel = (
        ("[has(self.function), has(self.url), has(self.builtin)].filter(given, given).size() <= 1", _AT_MOST),
        ("has(self.function) || has(self.url) || has(self.builtin) || has(self.model)", _AT_LEAST),
    )
    model: RewardModelSpec | None = None
    function: Function | None = Field(
        None,
        description="Python function in verl's, TRL's or verifiers' form, such as compute_score(data_source, "
        "solution_str, ground_truth, extra_info); runs in processes of its own",
    )
    builtin: Literal["math", "code", "json", "choice"] | None = Field(
        None,
        description="math: the last formula equals ground_truth (math-verify). code: the last code block "
        "passes the tests in ground_truth. json: the answer is JSON that fits ground_truth, a schema or a "
        "value. choice: the letter chosen is ground_truth",
    )
    url: str | None = Field(
        None,
        max_length=1024,
        pattern=r"^https?://.+$",
        description="verifier: the same by POST as JSON {items: [...]}; it answers {scores: [...]}",
    )
    timeout_seconds: int = Field(
        30, ge=1, le=3600, description="longest judging of one answer; a function that takes longer gives 0"
    )
    memory_megabytes: int = Field(
        2048, ge=64, le=1048576, description="memory of a process that runs the function; more gives 0"
    )
    workers: int = Field(4, ge=1, le=1024, description="answers judged at once")
    on_failure: Literal["zero", "stop"] = Field(
        "zero",
        description="a function that raises, hangs or dies: reward 0, or the job ends; one that cannot be "
        "started ends it always",
    )

    @model_validator(mode="after")
    def _check(self) -> "RewardSpec":
        rules = sum(rule is not None for rule in (self.function, self.url, self.builtin))
        if rules > 1:
            raise ValueError(_AT_MOST)
        if rules == 0 and self.model is None:
            raise ValueError(_AT_LEAST)
        return self
