"""Scripts of verl, and what becomes of them."""

from collections.abc import Mapping
from typing import Any

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.convert.choices import Choices
from grpo_operator.convert.convert import Conversion, convert
from grpo_operator.convert.reading.source import Framework

BASE = {
    "algorithm.adv_estimator": "grpo",
    "data.train_files": "$HOME/data/gsm8k/train.parquet",
    "data.train_batch_size": "256",
    "data.max_prompt_length": "512",
    "data.max_response_length": "1024",
    "actor_rollout_ref.model.path": "Qwen/Qwen3-8B",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "64",
    "actor_rollout_ref.rollout.n": "8",
    "trainer.n_gpus_per_node": "8",
    "trainer.nnodes": "2",
    "trainer.total_training_steps": "100",
}
A, R = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
T = f"+{A}.megatron.override_transformer_config"


def script(changes: Mapping[str, str | None]) -> str:
    options = {name: value for name, value in {**BASE, **changes}.items() if value is not None}
    return " \\\n    ".join(["python3 -m verl.trainer.main_ppo", *(f"{n}={v}" for n, v in options.items())])


def converted(
    changes: Mapping[str, str | None] | None = None, strict: bool = False, **choices: Any
) -> Conversion:
    return convert(Framework.VERL, [script(changes or {})], Choices(**choices), {}, strict=strict)


def spec(changes: Mapping[str, str | None] | None = None, **choices: Any) -> GRPOJobSpec:
    return GRPOJobSpec.model_validate(converted(changes, **choices).manifest["spec"])


def value(job: GRPOJobSpec, path: str) -> Any:
    found: Any = job.wire()
    for name in path.split("."):
        found = found[name]
    return found
