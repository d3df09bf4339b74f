"""DeepSeek-V3's multi-token prediction (MTP): an extra layer that predicts the token after the next."""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec, build_module

from grpo_worker.megatron.model.kernels import Kernels
from grpo_worker.megatron.model.layer_spec import layer_spec

NAME = "next_tokens"  # of the layer in a model chunk, and so in the keys of checkpoints


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
            with self.transformer_layer.register_forward_pre_hook(masked, with_kwargs=True):
                output: torch.Tensor = self._proj_and_transformer_layer(
                    hidden, embedded, packed_seq_params=packed
                )
            return output

        if not (self.training and torch.is_grad_enabled() and self._recomputed):
            return run(hidden, embedded)
        # Autograd enters a recomputation only through an input that has a gradient.
        recomputed: torch.Tensor = self._checkpointed_forward(run, hidden.detach().requires_grad_(), embedded)
        return recomputed

    @property
    def _recomputed(self) -> bool:
        """Whether the layer is recomputed as a whole, like all layers of the model."""
        return bool(self.config.recompute_method == "uniform")


def add_layer(model: Any, vp_stage: int | None, kernels: Kernels) -> None:
    """Add the MTP layer to a model chunk that has an output projection."""
    submodules = MultiTokenPredictionLayerSubmodules(
        enorm=kernels.norm,
        hnorm=kernels.norm,
        eh_proj=ColumnParallelLinear,
        transformer_layer=layer_spec(
            model.config, moe=model.config.num_moe_experts is not None, kernels=kernels
        ),
        layer_norm=kernels.norm,
    )
    groups = ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
    spec = ModuleSpec(MtpLayer, submodules=submodules)
    layer = build_module(spec, config=model.config, vp_stage=vp_stage, pg_collection=groups)
    model.add_module(NAME, layer)
