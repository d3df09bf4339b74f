"""Balance of the experts in Megatron-Core's routers."""

from typing import Any

from grpo_operator.api.v1alpha1.moe import MoeSpec


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
