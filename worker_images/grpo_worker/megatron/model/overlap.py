"""Overlap of the experts' communication with computation: Megatron-Core's combined 1F1B schedule.

It takes schedule plans instead of calling the model: each layer runs as parts (attention and router,
dispatch, experts, combine), those of a micro-batch's forward pass between those of another's backward pass.
So neither the model's ``forward`` nor that of a layer runs, nor their hooks.
"""

from typing import Any

import torch

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.moe import MoeSpec
from grpo_operator.api.v1alpha1.recompute import Recompute
from grpo_worker.megatron.families.registry import family_of


def overlap_fields(moe: MoeSpec, hf: dict[str, Any], layout: Layout, recompute: Recompute) -> dict[str, Any]:
    """Return Megatron-Core's fields.

    Raises ValueError if the job asks for the overlap and the model, the layout or the recomputation do not
    allow it.
    """
    if not moe.overlap_communication:
        return {}
    if problem := moe.problem(hf["model_type"]) or moe.overlap_problem(layout, recompute):
        raise ValueError(f"spec.trainer.{problem.removeprefix('spec.trainer.')}")
    frequency = family_of(hf).fields(hf)["moe_layer_freq"]
    if isinstance(frequency, list) and not frequency[-1]:
        # Megatron-Core would leave out the norm after it.
        raise ValueError(
            "spec.trainer.moe.overlapCommunication=true: the model's last layer has no experts: set "
            "overlapCommunication to false"
        )
    return {"overlap_moe_expert_parallel_comm": True}


def hand_mask(chunk: Any, mask: torch.Tensor) -> None:
    """Hand the padding of the next micro-batch, bool [b, s / (tp x cp)], to the routers of a model chunk.

    Megatron-Core's plans call them without it.
    """
    for layer in chunk.decoder.layers:
        if (router := getattr(layer.mlp, "router", None)) is not None:
            router.planned_mask = mask.transpose(0, 1)
