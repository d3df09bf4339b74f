"""A bare Megatron-Core training step: data-parallel wrapper, optimizer and schedule without our runner."""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func


def trainable(gpt: Any, lr: float) -> tuple[Any, Any]:
    """Return the model with gradient buffers and its distributed Adam (bf16, fp32 gradients)."""
    config = gpt.config
    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
    model = DistributedDataParallel(config, options, gpt)
    settings = OptimizerConfig(
        optimizer="adam", lr=lr, bf16=True, params_dtype=torch.bfloat16, use_distributed_optimizer=True,
        clip_grad=1.0,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(settings, [model])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def train_step(model: Any, optimizer: Any, forward: Callable[..., Any], count: int, length: int) -> None:
    """Run ``count`` micro-batches of one row of ``length`` tokens, and the optimizer.

    ``forward(iterator of row numbers, stage)`` is Megatron-Core's forward_step_func.
    """
    model.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(range(count)),
        model=model,
        num_microbatches=count,
        seq_length=length,
        micro_batch_size=1,
        forward_only=False,
    )
    optimizer.step()
