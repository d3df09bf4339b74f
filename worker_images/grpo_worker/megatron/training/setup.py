"""What every model on a rank is made from."""

from dataclasses import dataclass
from typing import Any

import torch

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.trainer import OffloadSpec
from grpo_worker.megatron.conversion.readers import WeightReader
from grpo_worker.megatron.families.base import Family
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.megatron.training.runner import MicroBatching


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """``hf``: config.json. ``reader``: where the initial weights come from.

    ``dtype``: of weights and activations; gradients and the optimizer's state are fp32.
    ``recompute``: keep only each layer's input for the backward pass. ``offload``: what waits in host
    memory while another role computes. ``next_tokens``: train the layer of multi-token prediction too.
    """

    hf: dict[str, Any]
    layout: Layout
    reader: WeightReader
    batching: MicroBatching = MicroBatching()
    dtype: torch.dtype = torch.float32
    recompute: bool = False
    offload: OffloadSpec = OffloadSpec()
    next_tokens: bool = False

    @property
    def family(self) -> Family:
        """The model's family. Raises ValueError for an unknown one."""
        return family_of(self.hf)
