"""What a job trains on, and what judges the answers."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from grpo_operator.api.base import Model, Path, ShortString

GYM = "reasoning-gym:"
Function = Annotated[
    str,
    Field(
        min_length=3, max_length=253, pattern=r"^(/[^:]+\.py|[A-Za-z_][A-Za-z0-9_.]*):[A-Za-z_][A-Za-z0-9_]*$"
    ),
]


class DataSpec(Model):
    """Prompts."""

    train: str = Field(
        min_length=1,
        max_length=1024,
        pattern=r"^(reasoning-gym:[a-z0-9_]+(\?[a-z0-9_=&.-]+)?|(/|[a-z][a-z0-9+]*://).+\.(parquet|jsonl|json))$",
        description="reasoning-gym:TASK?key=value&...: a seeded, endless task with its own verifier; or "
        "Parquet or JSON-lines files by path, pattern or URL (as fsspec has them), which need spec.reward",
    )
    prompt_key: ShortString = Field("prompt", description="column of the prompts: text, or chat messages")
    answer_key: ShortString = Field("answer", description="column that the reward function is handed")
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


class RewardModelSpec(Model):
    """A sequence classifier with one label, of a known architecture and with the policy's vocabulary,
    that runs frozen on the trainer's ranks."""

    path: Path = Field(
        pattern=r"^/.+$", description="Hugging Face directory with the weights, score.weight among them"
    )
    weight: float = Field(1.0, gt=0, le=1000, description="factor of its score in the reward")


class RewardSpec(Model):
    """What judges answers instead of a task's own verifier: function or url, or a model, or the sum of
    one of the two and a model."""

    cel = (
        ("!(has(self.function) && has(self.url))", "set at most one of function and url"),
        ("has(self.function) || has(self.url) || has(self.model)", "set function, url or model"),
    )
    model: RewardModelSpec | None = None
    function: Function | None = Field(
        None,
        description="Python function compute_score(data_source, solution_str, ground_truth, extra_info), as "
        "in verl; runs in processes of its own",
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
        "zero", description="a function that raises, hangs or dies: reward 0, or the step does not go on"
    )

    @model_validator(mode="after")
    def _check(self) -> "RewardSpec":
        if self.function is not None and self.url is not None:
            raise ValueError("set at most one of function and url")
        if self.function is None and self.url is None and self.model is None:
            raise ValueError("set function, url or model")
        return self
