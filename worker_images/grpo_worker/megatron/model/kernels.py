"""Kernels: the modules of which layers are built, from Transformer Engine or from Megatron-Core alone.

Both have the same parameters under the same names, but for routed experts: Transformer Engine keeps those of
a layer in one module. Checkpoints and Hugging Face tensors are the same.
"""

import importlib
import importlib.util
import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.moe import moe_utils

from grpo_operator.api.v1alpha1.trainer import KernelChoice, Precision
from grpo_worker.megatron.model.core_attention import CoreAttention
from grpo_worker.megatron.model.recompute import PlainCheckpoint

log = logging.getLogger(__name__)


class RMSNorm(torch.nn.Module):
    """RMS norm that supports sequence parallelism, which Megatron-Core's WrappedTorchNorm refuses.

    x: [..., hidden], any float dtype; the mean is computed in fp32. The result has x's shape and dtype.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Marks the gradient for the all-reduce over the TP group.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Kernels:
    """Classes of a layer's modules.

    ``linear``: of matrices that every tensor-parallel rank has as a whole. ``mlp``: Megatron-Core's provider
    of the modules of MLPs and experts. ``grouped``: a layer's experts are one module. ``fields``: of
    Megatron-Core's configuration.
    """

    name: KernelChoice
    norm: Any
    linear: Any
    column: Any
    row: Any
    attention: Any
    mlp: BackendSpecProvider
    grouped: bool
    fields: dict[str, Any] = field(default_factory=dict)


LOCAL = Kernels(
    KernelChoice.LOCAL, RMSNorm, Linear, ColumnParallelLinear, RowParallelLinear, CoreAttention,
    LocalSpecProvider(), grouped=False,
)  # fmt: skip


def kernels(choice: KernelChoice) -> Kernels:
    """Return the kernels of a job.

    ``auto``: Transformer Engine's on a GPU where it can be imported. Raises ValueError if the job asks for
    them and they are not there.
    """
    problem = "" if choice is KernelChoice.LOCAL else _problem()
    if choice is KernelChoice.LOCAL or (choice is KernelChoice.AUTO and problem):
        log.info("layers are built without Transformer Engine%s", f": {problem}" if problem else "")
        _without_transformer_engine()
        return LOCAL
    if problem:
        raise ValueError(
            f"spec.trainer.kernels=transformer-engine: {problem}: use an image that has Transformer Engine, "
            "or set it to auto or local"
        )
    from grpo_worker.megatron.model.transformer_engine import TRANSFORMER_ENGINE

    return TRANSFORMER_ENGINE


def mark_whole(model: torch.nn.Module, chosen: Kernels) -> None:
    """Mark the weights that tensor-parallel ranks have whole.

    Transformer Engine marks them as divided: they would count once for each rank in the gradient's norm.
    """
    for module in model.modules():
        if type(module) is chosen.linear:
            for parameter in module.parameters():
                parameter.tensor_model_parallel = False  # type: ignore[attr-defined]


def precision_fields(chosen: Kernels, precision: Precision) -> dict[str, Any]:
    """Return Megatron-Core's fields for the precision. Raises ValueError for kernels that do not have it."""
    if precision is Precision.BF16:
        return {}
    if chosen.name is KernelChoice.LOCAL:
        raise ValueError(
            f"spec.trainer.precision={precision} needs Transformer Engine: use an image that has it, or "
            "set it to bf16"
        )
    return {"fp8": "e4m3", "fp8_recipe": "blockwise"}


def transformer_engine_fields() -> dict[str, Any]:
    """Return the fields of Megatron-Core's configuration for Transformer Engine's kernels."""
    # Megatron-Core's output projection needs Apex to add to gradients within the product.
    fused_gradients = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    return {
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
        "moe_router_fusion": True,
        "apply_rope_fusion": True,
        "bias_activation_fusion": True,  # gate and activation in one kernel
        "gradient_accumulation_fusion": fused_gradients,
    }


def _problem() -> str:
    """Return why Transformer Engine cannot be used, or ""."""
    if not torch.cuda.is_available():
        return "this rank computes on a CPU"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError) as error:
        return f"Transformer Engine cannot be imported: {error}"
    return ""


def _without_transformer_engine() -> None:
    """Correct what Megatron-Core does where Transformer Engine cannot be imported.

    It silently imports mocks, on which isinstance() fails, leaves a name unbound that it reads later, and
    cannot recompute a module without it.
    """
    if _problem():
        multi_latent_attention.HAVE_TE = False
        multi_latent_attention.Linear = Linear  # later versions import it with Transformer Engine only
        moe_utils.__dict__.setdefault("te_general_gemm", None)
        tensor_parallel.CheckpointWithoutOutput = PlainCheckpoint
