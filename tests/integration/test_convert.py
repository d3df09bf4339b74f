"""Converted configurations are jobs for the API server too, not only for the models in Python."""

from collections.abc import Callable
from typing import Any

import pytest

from grpo_operator.api import manifest_yaml
from grpo_operator.convert.convert import Conversion
from support import nemo_rl_configs, slime_scripts, verl_scripts
from support.api_server import Api
from support.verl_scripts import A, R, T

_DAPO = {
    "algorithm.filter_groups.enable": "True",
    "algorithm.rollout_correction.rollout_is": "token",
    "reward.reward_kwargs.overlong_buffer_cfg.enable": "True",
    "reward.reward_kwargs.overlong_buffer_cfg.len": "64",
    f"{A}.clip_ratio_high": "0.28",
    f"{A}.optim.lr": "3e-7",
}
_PPO = {
    "algorithm.adv_estimator": "gae",
    f"{R}.n": "1",
    "critic.optim.weight_decay": "0.1",
    "trainer.critic_warmup": "3",
}
_LAYOUT = {
    f"{A}.megatron.tensor_model_parallel_size": "4",
    f"{T}.recompute_granularity": "selective",
    f"{T}.recompute_modules": "[mlp]",
    f"{A}.use_dynamic_bsz": "True",
    f"{A}.ppo_max_token_len_per_gpu": "9000",
    "+data.apply_chat_template_kwargs.enable_thinking": "False",
}
_VALIDATED = "--eval-prompt-data aime /root/aime-2024.jsonl --eval-interval 5"
CASES: dict[str, Callable[[], Conversion]] = {
    "verl": verl_scripts.converted,
    "verl DAPO": lambda: verl_scripts.converted(_DAPO),
    "verl PPO": lambda: verl_scripts.converted(_PPO),
    "verl with Megatron's options": lambda: verl_scripts.converted(_LAYOUT),
    "verl with nodes for engines": lambda: verl_scripts.converted(rollout_nodes=1),
    "verl with a reward function": lambda: verl_scripts.converted(reward="/data/mine.py:score"),
    "slime": slime_scripts.converted,
    "slime with a validation": lambda: slime_scripts.converted(_VALIDATED, "--rollout-num-gpus 8"),
    "NeMo-RL": nemo_rl_configs.converted,
}


@pytest.fixture(scope="module", autouse=True)
def operator() -> None:
    """These tests need none: nothing is created."""


def _refusal(api: Api, manifest: dict[str, Any]) -> str:
    """Return why the API server refuses a manifest, or ""."""
    dry_run = "apply", "--dry-run=server", "--validate=strict", "-f", "-"
    done = api.run(*dry_run, stdin=manifest_yaml.dump(manifest))
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize("name", CASES)
def test_a_converted_configuration_is_accepted(api: Api, name: str) -> None:
    assert _refusal(api, CASES[name]().manifest) == ""


def test_another_manifest_is_refused(api: Api) -> None:
    manifest = verl_scripts.converted().manifest
    manifest["spec"]["algorithm"]["colour"] = "red"
    assert 'unknown field "spec.algorithm.colour"' in _refusal(api, manifest)
