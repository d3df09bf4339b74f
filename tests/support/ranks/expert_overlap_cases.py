"""Functions that run on ranks: a step in bf16 whose experts' communication overlaps with computation."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.moe import MoeSpec
from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.megatron.conversion.readers import SeededWeights
from grpo_worker.megatron.model.build import initialize_parallel
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.megatron.training.runner import MicroBatching
from grpo_worker.megatron.training.setup import ModelSetup
from support.ranks.fidelity_cases import keep_gradients, random_experts
from support.ranks.policy_cases import SEED, batch, everywhere, own_rows, update, whole_weights
from support.recompute import recompute_of
from support.tiny_models import tiny_model


def step(
    model: str,
    layout: dict[str, int],
    overlap: bool,
    packed: bool = False,
    recompute: str = "none",
    replay: bool = False,
) -> dict[str, Any]:
    """Return the gradient of a step under Hugging Face names, its figures, and the plans that it ran."""
    hf, parallel = tiny_model(model), Layout(world=dist.get_world_size(), **layout)
    initialize_parallel(parallel, SEED)
    setup = ModelSetup(
        hf, parallel, SeededWeights(hf, SEED), MicroBatching(2, 80 if packed else None), torch.bfloat16,
        recompute=recompute_of(recompute),
        moe=MoeSpec(overlap_communication=overlap, aux_loss_coefficient=0.01),
    )  # fmt: skip
    policy = PolicyModel(setup, OptimizerSpec(lr=1e-3), 100, with_reference=False, replay_routing=replay)
    data = batch(0)
    if replay:
        data["routed_experts"] = random_experts(hf, *data["input_ids"].shape)
    data = own_rows(data)
    data["old_log_probs"] = everywhere(policy, data)
    data["ref_log_prob"] = data["old_log_probs"] - 0.1
    original, plans = GPTModel.build_schedule_plan, []

    def counted(chunk: Any, *args: Any, **kwargs: Any) -> Any:
        plans.append(chunk)
        return original(chunk, *args, **kwargs)

    with (
        patch.object(policy.trainable, "step", lambda: keep_gradients(policy)),
        patch.object(GPTModel, "build_schedule_plan", counted),
    ):
        figures = update(policy, data, kl=0.1)
    return {"gradient": whole_weights(policy), "figures": figures, "plans": len(plans)}


def refused(model: str, layout: dict[str, int], recompute: str = "none", **changes: Any) -> str:
    """Return why the trained models of a rank cannot be built with the overlap, or ""."""
    hf, parallel = tiny_model(model) | changes, Layout(world=dist.get_world_size(), **layout)
    setup = ModelSetup(
        hf, parallel, SeededWeights(hf, SEED), recompute=recompute_of(recompute),
        moe=MoeSpec(overlap_communication=True),
    )  # fmt: skip
    try:
        setup.build_trained()
    except ValueError as error:
        return str(error)
    return ""
