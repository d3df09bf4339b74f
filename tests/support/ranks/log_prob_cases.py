"""Functions that run on ranks: passes without gradients with sizes of their own."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.megatron.conversion.readers import SeededWeights
from grpo_worker.megatron.model.build import initialize_parallel
from grpo_worker.megatron.training.critic import CriticModel
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.megatron.training.runner import MicroBatching
from grpo_worker.megatron.training.setup import ModelSetup
from grpo_worker.profiling.progress import PROGRESS
from support.padded import padded_tokens
from support.ranks.policy_cases import SEED, batch, everywhere, on_every_rank, own_part, own_rows, update
from support.tiny_models import tiny_model

T = TypeVar("T")


def outcome(model: str, layout: dict[str, int], sizes: dict[str, int]) -> dict[str, Any]:
    """Return log-probs, reference, values and an update, with the forward passes that each of them took."""
    policy, critic = _models(model, layout, sizes)
    data = own_rows(batch(0))
    found: dict[str, Any] = {}
    found["log_probs"] = _counted(lambda: everywhere(policy, data))
    found["reference"] = _counted(lambda: everywhere(policy, data, reference=True))
    found["values"] = _counted(lambda: _values(policy, critic, data))
    # The update gets the same numbers whatever the passes before it computed.
    data["old_log_probs"] = data["response_mask"] * -4.0
    data["ref_log_prob"] = data["old_log_probs"] - 0.1
    found["update"] = _counted(lambda: update(policy, data))
    return found


def refusal(layout: dict[str, int], sizes: dict[str, int]) -> str:
    """Return why the passes without gradients cannot be divided."""
    policy, _ = _models("qwen3", layout, sizes)
    try:
        everywhere(policy, own_rows(batch(0)))
    except ValueError as error:
        return str(error)
    return "accepted"


def _models(model: str, layout: dict[str, int], sizes: dict[str, int]) -> tuple[PolicyModel, CriticModel]:
    hf, parallel = tiny_model(model), Layout(world=dist.get_world_size(), **layout)
    initialize_parallel(parallel, SEED)
    setup = ModelSetup(hf, parallel, SeededWeights(hf, SEED), MicroBatching(**sizes))
    return PolicyModel(setup, OptimizerSpec(lr=1e-3), 100), CriticModel(setup, OptimizerSpec(), 100)


def _values(policy: PolicyModel, critic: CriticModel, data: dict[str, torch.Tensor]) -> torch.Tensor:
    rows = own_part(policy, data)
    found = critic.values(rows).get("values")
    return on_every_rank(None if found is None else padded_tokens(found, rows), data)


def _counted(call: Callable[[], T]) -> tuple[T, int]:
    before = PROGRESS.amounts().get("forward passes", 0)
    result = call()
    return result, PROGRESS.amounts()["forward passes"] - before
