"""Settings shared by all models of a rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.moe import MoeSpec
from grpo_operator.api.v1alpha1.offload import OffloadSpec
from grpo_operator.api.v1alpha1.optimizer_dtypes import OptimizerDtypes
from grpo_operator.api.v1alpha1.recompute import NOTHING, Recompute
from grpo_operator.api.v1alpha1.trainer import KernelChoice, Precision
from grpo_worker.megatron.conversion.readers import WeightReader
from grpo_worker.megatron.families.base import Family
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.megatron.model.build import build_chunks
from grpo_worker.megatron.model.overlap import overlap_fields
from grpo_worker.megatron.model.router import balance_fields
from grpo_worker.megatron.model.token_dispatcher import DispatcherChoice
from grpo_worker.megatron.training.runner import MicroBatching


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """Settings from which policy, critic and reward model are built.

    ``hf``: contents of config.json. ``reader``: source of the initial weights. ``dtype``: of weights and
    activations. ``optimizer_dtypes``: of gradients and moments of the trained models. ``recompute``: what the
    backward pass of trained models computes again. ``offload``: state that waits in host memory while another
    role computes, and activations of trained models that wait there for the backward pass. ``mtp``: also
    train the layer of multi-token prediction. ``moe``: balance of the experts of the trained models, and
    dispatcher of all models' tokens. ``gpus_per_node``: of the training pool.
    ``kernels``, ``precision``: of all models' layers. ``deterministic``: whether these add in a fixed order.
    ``megatron``: fields of all models' configurations that the job passes through.
    """

    hf: dict[str, Any]
    layout: Layout
    reader: WeightReader
    batching: MicroBatching = MicroBatching()
    dtype: torch.dtype = torch.float32
    recompute: Recompute = NOTHING
    offload: OffloadSpec = OffloadSpec()
    optimizer_dtypes: OptimizerDtypes = OptimizerDtypes()
    mtp: bool = False
    moe: MoeSpec = MoeSpec()
    kernels: KernelChoice = KernelChoice.LOCAL
    precision: Precision = Precision.BF16
    megatron: Mapping[str, Any] = field(default_factory=dict)
    gpus_per_node: int = 8
    deterministic: bool = False

    @property
    def family(self) -> Family:
        """The model's family. Raises ValueError when it is not supported."""
        return family_of(self.hf)

    def build(self, **fields: Any) -> list[Any]:
        """Build the chunks of a model without its weights. ``fields``: further ones of build_chunks."""
        common: dict[str, Any] = {
            "choice": self.kernels, "precision": self.precision, "passed": self.megatron,
            "dispatcher": DispatcherChoice(self.moe.dispatcher, self.gpus_per_node),
            "deterministic_mode": self.deterministic,
        }  # fmt: skip
        return build_chunks(self.hf, self.layout, self.dtype, **common, **fields)

    def build_trained(self, **fields: Any) -> list[Any]:
        """Build the chunks of a model that is trained, like ``build``."""
        fields |= overlap_fields(self.moe, self.hf, self.layout, self.recompute)
        offloaded = tuple(self.offload.activations or ())
        return self.build(recompute=self.recompute, offloaded=offloaded, **self.balance_fields(), **fields)

    def balance_fields(self) -> dict[str, Any]:
        """Return Megatron-Core's fields for ``moe``. Raises ValueError when the model has no use for it."""
        return balance_fields(self.moe, self.hf["model_type"])
