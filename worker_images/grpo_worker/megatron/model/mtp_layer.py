"""DeepSeek-V3's multi-token prediction (MTP): an extra layer that predicts the token after the next."""

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from grpo_worker.megatron.families.base import MTP_LAYER
from grpo_worker.megatron.model.kernels import Kernels
from grpo_worker.megatron.model.layer_spec import layer_spec
from grpo_worker.megatron.versions import MTP_INNER_LAYER


class MtpLayer(MultiTokenPredictionLayer):  # type: ignore[misc]
    """Megatron-Core's MTP layer, called with embeddings that are already looked up."""

    def forward(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        packed: PackedSeqParams | None,
        padding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return hidden states for the token after the next, [s / (tp x cp), b, h].

        ``hidden``: states of the last layer; ``embedded``: embedding of each next token; both of that shape.
        ``padding``: bool [b, s / (tp x cp)], True at the tokens that the router must ignore.
        """

        def masked(_layer: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, kwargs | {"padding_mask": padding}

        def run(hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
            # Megatron-Core 0.16.1 hands no mask to the layer inside.
            with self.inner_layer.register_forward_pre_hook(masked, with_kwargs=True):
                output: torch.Tensor = self._proj_and_transformer_layer(
                    hidden, embedded, packed_seq_params=packed
                )
            return output

        if not (self.training and torch.is_grad_enabled() and self._recomputed):
            return run(hidden, embedded)
        # Autograd enters a recomputation only through an input that has a gradient.
        return self._checkpoint(run, hidden.detach().requires_grad_(), embedded)

    @property
    def inner_layer(self) -> Any:
        """The transformer layer inside."""
        return getattr(self, MTP_INNER_LAYER)

    @property
    def _recomputed(self) -> bool:
        """Whether the layer is recomputed as a whole, like all layers of the model."""
        return bool(self.config.recompute_method == "uniform")

    def _checkpoint(self, run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> torch.Tensor:
        """Return ``run(*inputs)``, which the backward pass computes again."""
        distributed = self.config.distribute_saved_activations
        output: torch.Tensor
        if self.config.fp8:
            from megatron.core.extensions.transformer_engine import te_checkpoint

            group = parallel_state.get_tensor_model_parallel_group()
            tracker = tensor_parallel.get_cuda_rng_tracker
            output = te_checkpoint(run, distributed, tracker, group, *inputs)
        else:
            output = tensor_parallel.checkpoint(run, distributed, *inputs)
        return output


def add_layer(model: Any, vp_stage: int | None, kernels: Kernels) -> None:
    """Add the MTP layer to a model chunk that has an output projection."""
    config = copy(model.config)
    # Later versions than 0.16.1 build the layer inside only if it is set. In the model's configuration it
    # would make Megatron-Core add a loss of its own.
    config.mtp_num_layers = 1
    inner = {MTP_INNER_LAYER: layer_spec(config, moe=config.num_moe_experts is not None, kernels=kernels)}
    submodules = MultiTokenPredictionLayerSubmodules(
        enorm=kernels.norm, hnorm=kernels.norm, eh_proj=ColumnParallelLinear, layer_norm=kernels.norm, **inner
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    spec = ModuleSpec(MtpLayer, submodules=submodules)
    layer = build_module(spec, config=config, vp_stage=vp_stage, pg_collection=groups)
    model.add_module(MTP_LAYER, layer)
