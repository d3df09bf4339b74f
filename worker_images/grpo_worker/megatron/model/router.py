"""Router of the MoE layers: Megatron-Core's, with its faults at padding corrected."""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, switch_load_balancing_loss_func
from megatron.core.transformer.moe.router import TopKRouter

from grpo_operator.api.v1alpha1.moe import MoeSpec


class Router(TopKRouter):  # type: ignore[misc]
    """Top-k router in which padding neither moves the expert bias nor takes part in the auxiliary loss.

    Masks are bool and True at padding, whatever the docstrings of Megatron-Core's MoE layers say.
    ``planned_mask``: that of the current micro-batch, [s / (tp x cp), b], if a schedule plan runs the layer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.planned_mask: torch.Tensor | None = None
        self.register_forward_pre_hook(_with_planned_mask)

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Count the tokens of each expert. ``routing_map``: [tokens, experts]; ``padding_mask``: [tokens]."""
        # Megatron-Core 0.16.1 combines the two without a dimension for the experts, which fails or, with as
        # many tokens as experts, masks experts instead of tokens.
        real = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
        super()._apply_expert_bias(real)

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,
    ) -> torch.Tensor:
        """Attach the gradient of the load-balancing loss to ``probs``. Scores and map are 0 at padding."""
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        counts = reduce_from_tensor_model_parallel_region(routing_map.sum(dim=0), self.tp_cp_group)
        # A micro-batch that only keeps data-parallel ranks in step has no token, and dividing by their
        # number would make every gradient NaN.
        tokens = (counts.sum() / self.topk).clamp(min=1)
        loss = switch_load_balancing_loss_func(
            scores_for_aux_loss, counts, tokens, self.topk, self.config.num_moe_experts, coefficient
        )
        attached: torch.Tensor = MoEAuxLossAutoScaler.apply(probs, loss)
        return attached


def _with_planned_mask(router: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the inputs of a router with the mask, which schedule plans of Megatron-Core do not hand over."""
    if router.planned_mask is None or any(mask is not None for mask in inputs[1:]):
        return inputs
    return inputs[0], router.planned_mask


def balance_fields(moe: MoeSpec, model_type: str) -> dict[str, Any]:
    """Return Megatron-Core's fields for the balance of the experts.

    ``model_type``: of config.json. Raises ValueError when such a model cannot be trained with ``moe``.
    """
    if problem := moe.problem(model_type):
        raise ValueError(problem)
    kind = "aux_loss" if moe.aux_loss_coefficient else "none"
    return {
        "moe_router_bias_update_rate": moe.bias_update_rate,
        "moe_router_load_balancing_type": kind,
        "moe_aux_loss_coeff": moe.aux_loss_coefficient,
    }
