"""One rank's share of the policy: Megatron-Core model, optimizer, schedule, forward and step."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from grpo_operator.api.layout import Layout
from grpo_operator.api.trainer import OptimizerSpec
from grpo_worker.algorithms.losses import PolicyLossConfig, clipped_policy_loss, kl_estimate
from grpo_worker.megatron import weights
from grpo_worker.megatron.config_map import mcore_config
from grpo_worker.megatron.layer_spec import block_spec

Batch = dict[str, torch.Tensor]
ReadWeights = Callable[[str], torch.Tensor]


def initialize_parallel(layout: Layout, seed: int) -> None:
    """Create Megatron-Core's process groups and seed every generator of this rank."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def build_gpt(hf: dict[str, Any], layout: Layout, recompute: bool = False) -> GPTModel:
    """This rank's pipeline stage, with random weights.

    ``recompute``: keep only each layer's input, and compute the layer again in the backward pass.
    """
    config = mcore_config(hf, layout, **(_RECOMPUTE if recompute else {}))
    return GPTModel(
        config,
        block_spec(config),
        vocab_size=hf["vocab_size"],
        max_sequence_length=hf["max_position_embeddings"],
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )


class PolicyModel:
    """Trainable policy and, with the same layout, the frozen reference."""

    def __init__(
        self,
        hf: dict[str, Any],
        layout: Layout,
        optimizer: OptimizerSpec,
        total_steps: int,
        read: ReadWeights,
        micro_batch_size: int,
        recompute: bool = False,
    ) -> None:
        self.layout = layout
        self.micro_batch_size = micro_batch_size
        self.module = build_gpt(hf, layout, recompute)
        weights.load(self.module, read)
        self.reference = build_gpt(hf, layout).eval().requires_grad_(False)
        weights.load(self.reference, read)
        self.ddp = self._wrap()
        self.optimizer = get_megatron_optimizer(_optimizer_config(optimizer), [self.ddp])
        self.module.config.finalize_model_grads_func = finalize_model_grads
        self.module.config.grad_scale_func = self.optimizer.scale_loss
        self.schedule = _schedule(self.optimizer, optimizer, total_steps)

    def _wrap(self) -> DistributedDataParallel:
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, check_for_nan_in_grad=True
        )
        ddp = DistributedDataParallel(self.module.config, config, self.module)
        ddp.broadcast_params()
        return ddp

    def log_probs(self, batch: Batch, temperature: float, reference: bool = False) -> torch.Tensor:
        """Log-probability of each token given those before it.

        batch["input_ids"]: [b, s] int64, right-padded. Returns [b, s] fp32, 0 at column 0; on
        ranks outside the last pipeline stage an empty tensor.
        """
        model = self.reference if reference else self.module
        model.eval()
        outputs: list[torch.Tensor] = []

        def forward(data: Iterator[Batch], stage: Any) -> tuple[torch.Tensor, Any]:
            micro = next(data)
            output = _forward(stage, micro, temperature)

            def collect(result: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
                outputs.append(result)
                return result.sum(), {}

            return output, collect

        with torch.no_grad():
            self._run(forward, model, batch, forward_only=True)
        return torch.cat(outputs) if outputs else torch.empty(0)

    def update(
        self, batch: Batch, loss: PolicyLossConfig, kl_coef: float, temperature: float
    ) -> dict[str, float]:
        """One optimizer step on this data-parallel rank's share of a mini-batch.

        batch, all [b, s] fp32 but input_ids: input_ids, old_log_probs, ref_log_prob,
        advantages, weights (which sum to 1 over the *global* mini-batch).
        Returns metrics summed over the global mini-batch, the same on every rank.
        """
        self.ddp.train()
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        micro_batches = len(_split(batch, self.micro_batch_size))
        # The schedule divides by the micro-batches, DDP averages over data-parallel ranks.
        scale = micro_batches * self.layout.data
        sums: list[torch.Tensor] = []

        def forward(data: Iterator[Batch], stage: Any) -> tuple[torch.Tensor, Any]:
            micro = next(data)
            output = _forward(stage, micro, temperature)

            def loss_function(log_prob: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
                total, metrics = _grpo_loss(log_prob, micro, loss, kl_coef)
                sums.append(metrics)
                return total * scale, {}

            return output, loss_function

        self._run(forward, self.ddp, batch, forward_only=False)
        lr = float(self.optimizer.param_groups[0]["lr"])
        _, grad_norm, _ = self.optimizer.step()
        self.schedule.step(increment=1)
        return _metrics(sums) | {"actor/grad_norm": float(grad_norm), "actor/lr": lr}

    def _run(self, forward: Any, model: Any, batch: Batch, forward_only: bool) -> None:
        parts = _split(batch, self.micro_batch_size)
        get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter(parts),
            model=model,
            num_microbatches=len(parts),
            seq_length=batch["input_ids"].shape[1],
            micro_batch_size=parts[0]["input_ids"].shape[0],
            forward_only=forward_only,
        )


def _split(batch: Batch, size: int) -> list[Batch]:
    rows = batch["input_ids"].shape[0]
    return [{k: v[i : i + size] for k, v in batch.items()} for i in range(0, rows, size)]


def _forward(model: Any, batch: Batch, temperature: float) -> torch.Tensor:
    """Hidden states on inner stages; log-probabilities [b, s] on the last."""
    ids = batch["input_ids"]
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids).contiguous()
    output: torch.Tensor = model(ids, positions, None)
    if not parallel_state.is_pipeline_last_stage():
        return output
    logits = output.transpose(0, 1).float()  # [s, b, vocab / tp]
    if temperature != 1.0:  # a division would keep one more copy of the largest tensor
        logits = logits / temperature
    labels = torch.roll(ids, -1, dims=1).transpose(0, 1).contiguous()
    log_prob = -vocab_parallel_cross_entropy(logits.contiguous(), labels).transpose(0, 1)
    # Entry t of the model's output predicts token t + 1.
    return torch.nn.functional.pad(log_prob[:, :-1], (1, 0))


def _grpo_loss(
    log_prob: torch.Tensor, batch: Batch, config: PolicyLossConfig, kl_coef: float
) -> tuple[torch.Tensor, torch.Tensor]:
    weight = batch["weights"]
    policy, clipped = clipped_policy_loss(log_prob, batch["old_log_probs"], batch["advantages"], config)
    kl = kl_estimate(log_prob, batch["ref_log_prob"], config.kl_loss_type)
    loss = (weight * policy).sum()
    if config.use_kl_loss:
        loss = loss + kl_coef * (weight * kl).sum()
    ppo_kl = (weight * (batch["old_log_probs"] - log_prob)).sum()
    parts = [loss, (weight * policy).sum(), (weight * kl).sum(), (weight * clipped).sum(), ppo_kl]
    return loss, torch.stack([p.detach() for p in parts])


_NAMES = ("actor/loss", "actor/pg_loss", "actor/kl_loss", "actor/pg_clipfrac", "actor/ppo_kl")


def _metrics(sums: list[torch.Tensor]) -> dict[str, float]:
    total = torch.stack(sums).sum(0) if sums else torch.zeros(len(_NAMES))
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
    # Only the last stage computed a loss; the others contribute zeros.
    dist.all_reduce(total, group=parallel_state.get_pipeline_model_parallel_group())
    return dict(zip(_NAMES, total.tolist(), strict=True))


def _optimizer_config(spec: OptimizerSpec) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=spec.lr,
        min_lr=spec.min_lr,
        weight_decay=spec.weight_decay,
        adam_beta1=spec.adam_beta1,
        adam_beta2=spec.adam_beta2,
        clip_grad=spec.clip_grad,
        use_distributed_optimizer=True,
        params_dtype=torch.float32,
    )


def _schedule(optimizer: Any, spec: OptimizerSpec, total_steps: int) -> OptimizerParamScheduler:
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=spec.lr,
        min_lr=spec.min_lr,
        lr_warmup_steps=spec.lr_warmup_steps,
        lr_decay_steps=max(total_steps, spec.lr_warmup_steps + 1),
        lr_decay_style=spec.lr_decay_style,
        start_wd=spec.weight_decay,
        end_wd=spec.weight_decay,
        wd_incr_steps=total_steps,
        wd_incr_style="constant",
    )
