"""Models of kernels.py and how it builds them."""

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from models import MODEL as WITH_MTP
from trainer_speed import DeviceWeights

from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.offload import OffloadSpec
from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_operator.api.v1alpha1.optimizer_dtypes import OptimizerDtypes
from grpo_operator.api.v1alpha1.recompute import NOTHING, Recompute
from grpo_operator.api.v1alpha1.trainer import KernelChoice, Precision
from grpo_worker.megatron.optim.optimizer import inner_optimizers
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.megatron.training.runner import FP8_TOKENS, MicroBatching
from grpo_worker.megatron.training.setup import ModelSetup

LOCAL, ENGINE = KernelChoice.LOCAL, KernelChoice.TRANSFORMER_ENGINE
BF16, FP8 = Precision.BF16, Precision.FP8_BLOCK128
ONE = Layout(world=1)
FP32_STATE = OptimizerDtypes()
KEPT = OffloadSpec()
SMALL: dict[str, Any] = WITH_MTP | {"num_nextn_predict_layers": 0, "num_hidden_layers": 3}
# Four layers of DeepSeek-V3. Eight experts get all tokens, as those of one of 32 expert-parallel ranks do.
SLICE: dict[str, Any] = architecture("deepseek-v3") | {
    "num_hidden_layers": 4, "first_k_dense_replace": 0, "n_routed_experts": 8, "num_experts_per_tok": 8,
    "n_group": 1, "topk_group": 1, "vocab_size": 4096, "num_nextn_predict_layers": 0,
}  # fmt: skip
Kind = tuple[KernelChoice, Precision]


def setup(
    hf: dict[str, Any],
    kind: Kind,
    dtype: torch.dtype = torch.bfloat16,
    max_tokens: int | None = None,
    layout: Layout = ONE,
    recompute: Recompute = NOTHING,
    optimizer_dtypes: OptimizerDtypes = FP32_STATE,
    offload: OffloadSpec = KEPT,
) -> ModelSetup:
    choice, precision = kind
    batching = MicroBatching(1, max_tokens, 1 if precision is BF16 else FP8_TOKENS)
    return ModelSetup(
        hf, layout, DeviceWeights(hf), batching, dtype, recompute, offload,
        optimizer_dtypes=optimizer_dtypes, kernels=choice, precision=precision,
    )  # fmt: skip


def policy(hf: dict[str, Any], kind: Kind, *args: Any, **fields: Any) -> PolicyModel:
    """Build a policy without a reference. Other arguments are those of ``setup``."""
    return PolicyModel(
        setup(hf, kind, *args, **fields), OptimizerSpec(lr=1e-5), 100, with_reference=False
    )  # fmt: skip


def discard(model: PolicyModel) -> None:
    """Free the model's memory: hooks in C++ keep its objects alive after the last reference is gone."""
    for ddp in model.trainable.ddp:
        for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
            for tensor in (buffer.grad_data, buffer.param_data):
                tensor.untyped_storage().resize_(0)
    for optimizer in inner_optimizers(model.trainable.optimizer):
        optimizer.state.clear()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.untyped_storage().resize_(0)
    if (base := sys.modules.get("transformer_engine.pytorch.module.base")) is not None:
        base._dummy_wgrads.clear()  # each process of a job has its own
    free()


def seconds(call: Callable[[], Any]) -> float:
    """Return the seconds of a call until the GPU has done its work."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
