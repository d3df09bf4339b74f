"""Construction of the models and services of one trainer rank.

Import this module only after ``megatron.cpu.platform.install()``: it imports Megatron-Core.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from grpo_operator.api.base import Device
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.trainer import Precision
from grpo_worker.checkpointing.space import estimated_bytes
from grpo_worker.checkpointing.store import Origin, model_digest, parts_of
from grpo_worker.common.store_path import store_path
from grpo_worker.data.routed_experts import ExpertLayers
from grpo_worker.megatron.checkpoint.checkpointer import Checkpointer
from grpo_worker.megatron.checkpoint.part import CheckpointPart
from grpo_worker.megatron.conversion.readers import weight_reader
from grpo_worker.megatron.deterministic import require_deterministic
from grpo_worker.megatron.families.registry import expert_layers
from grpo_worker.megatron.model.build import device, initialize_parallel
from grpo_worker.megatron.training.critic import CriticModel
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.megatron.training.reductions import active_parameters, all_parameters
from grpo_worker.megatron.training.reward_model import RewardModel
from grpo_worker.megatron.training.runner import FP8_TOKENS, MicroBatching
from grpo_worker.megatron.training.setup import ModelSetup
from grpo_worker.metrics.flops import ModelFlops, attention_width
from grpo_worker.roles.dispatch import RankInfo
from grpo_worker.weightsync.trainer.links import TrainerLinks


@dataclass(frozen=True, slots=True)
class TrainerModels:
    """Everything that a trainer rank builds once, when it starts.

    ``hf``: contents of config.json. ``parts``: the state that checkpoints and snapshots contain.
    ``links``: send weights to the engines. ``expert_layers``: with routing replay only.
    """

    spec: GRPOJobSpec
    hf: dict[str, Any]
    policy: PolicyModel
    critic: CriticModel | None
    reward_model: RewardModel | None
    parts: list[CheckpointPart]
    checkpointer: Checkpointer
    links: TrainerLinks
    flops: ModelFlops
    checkpoint_bytes: int  # of all ranks, estimated
    expert_layers: ExpertLayers | None = None


def build_models(rank: int, world: int, config: dict[str, Any]) -> TrainerModels:
    """Create the process groups and build the models of this rank. Collective.

    ``config``: the job's ``spec``, ``hf`` (contents of config.json), ``checkpoints`` (root directory) and
    ``attempt``.
    Raises RuntimeError when the job trains on GPUs and this rank has none, and ValueError for models or
    layouts that cannot be trained.
    """
    spec = GRPOJobSpec.model_validate(config["spec"], extra="ignore")
    if spec.trainer.device is Device.CUDA and not torch.cuda.is_available():
        raise RuntimeError("spec.trainer.device is cuda, but this rank sees no GPU: check its pod's limits")
    if spec.trainer.deterministic:
        require_deterministic()
    hf, layout = config["hf"], spec.trainer.parallelism.layout(world)
    initialize_parallel(layout, spec.seed)
    links = TrainerLinks(rank, world, device())
    setup = _model_setup(spec, hf, world)
    policy, critic, reward_model = _policy(spec, setup), _critic(spec, setup), _reward_model(spec, setup)
    parts = policy.parts(spec.algorithm.refresh_reference_steps is not None)
    if critic is not None:
        parts.append(CheckpointPart("critic.", critic.trainable.chunks, critic.trainable))
    with policy.trainable.weights.on_device():
        flops = ModelFlops(active_parameters(policy.chunks, policy.family), attention_width(hf))
        count = all_parameters(policy.chunks, policy.family)
    origin = Origin(model_digest(hf), str(layout), config["attempt"], parts_of(spec))
    return TrainerModels(
        spec,
        hf,
        policy,
        critic,
        reward_model,
        parts,
        Checkpointer(
            store_path(spec.checkpoint.store, config["checkpoints"]), parts, spec.checkpoint.keep, origin
        ),
        links,
        flops,
        _checkpoint_bytes(spec, count),
        expert_layers(hf) if spec.algorithm.routing_replay else None,
    )


def _checkpoint_bytes(spec: GRPOJobSpec, parameters: int) -> int:
    return estimated_bytes(
        parameters,
        2 if torch.cuda.is_available() else 4,
        critic=spec.algorithm.critic is not None,
        reference=spec.algorithm.refresh_reference_steps is not None,
        copy=spec.fills_engines_from_store,
    )


def rank_info(rank: int, models: TrainerModels) -> RankInfo:
    """Return the coordinates of this rank in the layout of the built models."""
    layout = models.policy.layout
    return RankInfo(
        rank,
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        layout.pipeline,
        layout.data,
        layout.tensor,
        layout.context,
        models.policy.packs,
    )


def _model_setup(spec: GRPOJobSpec, hf: dict[str, Any], world: int) -> ModelSetup:
    trainer = spec.trainer
    multiple = 1 if trainer.precision is Precision.BF16 else FP8_TOKENS
    return ModelSetup(
        hf,
        trainer.parallelism.layout(world),
        weight_reader(spec.model.path, hf, spec.seed),
        MicroBatching(
            trainer.micro_batch_size_per_gpu,
            trainer.max_tokens_per_gpu,
            multiple,
            trainer.log_prob_micro_batch_size_per_gpu,
            trainer.log_prob_max_tokens_per_gpu,
        ),
        torch.bfloat16 if torch.cuda.is_available() else torch.float32,
        recompute=trainer.recomputation(),
        offload=trainer.offload,
        optimizer_dtypes=trainer.precision_aware_optimizer,
        mtp=spec.model.multi_token_prediction,
        moe=trainer.moe,
        kernels=trainer.kernels,
        precision=trainer.precision,
        megatron=trainer.megatron,
        gpus_per_node=trainer.gpus_per_node,
        deterministic=trainer.deterministic,
    )


def _policy(spec: GRPOJobSpec, setup: ModelSetup) -> PolicyModel:
    return PolicyModel(
        setup,
        spec.trainer.optimizer,
        spec.updates,
        with_reference=spec.algorithm.needs_reference,
        replay_routing=spec.algorithm.routing_replay,
    )


def _critic(spec: GRPOJobSpec, setup: ModelSetup) -> CriticModel | None:
    critic = spec.algorithm.critic
    return CriticModel(setup, critic.optimizer, spec.updates) if critic else None


def _reward_model(spec: GRPOJobSpec, setup: ModelSetup) -> RewardModel | None:
    model = spec.reward.model if spec.reward else None
    return RewardModel(model.path, setup) if model else None
