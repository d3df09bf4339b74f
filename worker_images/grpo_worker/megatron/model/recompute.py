"""Recomputation of activations: Megatron-Core's fields for it, and two of its faults corrected."""

from typing import Any

from megatron.core.tensor_parallel import CheckpointWithoutOutput

from grpo_operator.api.v1alpha1.recompute import Recompute, RecomputeKind, RecomputeModule


class PlainCheckpoint(CheckpointWithoutOutput):  # type: ignore[misc]
    """Recomputation of a module, for ranks without Transformer Engine.

    Megatron-Core 0.16.1 reads ``fp8=False`` as FP8 and asks Transformer Engine for its state.
    """

    def __init__(self, fp8: Any = False) -> None:
        super().__init__(fp8)
        self.fp8 = bool(fp8)


def recompute_fields(recompute: Recompute, grouped: bool) -> dict[str, Any]:
    """Return Megatron-Core's fields.

    ``grouped``: the kernels compute the experts of a layer in one product. Raises ValueError for modules
    that need such kernels.
    """
    if RecomputeModule.MOE_ACT in recompute.modules and not grouped:
        raise ValueError(
            "spec.trainer.recomputeModules: moe_act needs the experts of a layer in one product, and these "
            "ranks compute without Transformer Engine: use an image that has it, or set recomputeModules "
            "without moe_act"
        )
    if recompute.kind is RecomputeKind.NONE:
        return {}
    if recompute.kind is RecomputeKind.SELECTIVE:
        modules = [str(module) for module in recompute.modules]
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    method, layers = ("uniform", 1) if recompute.layers is None else ("block", recompute.layers)
    return {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": layers}


def mask_kept_layers(chunk: Any, recompute: Recompute) -> None:
    """Hand the padding mask to the layers of a model chunk that are not recomputed while others are.

    Megatron-Core 0.16.1 hands it to the recomputed ones only, and routers would count padding.
    """
    if recompute.layers is None:
        return
    current: dict[str, Any] = {}

    def remember(_block: Any, _args: Any, given: dict[str, Any]) -> None:
        current["padding_mask"] = given.get("padding_mask")

    def hand_over(_layer: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, given | current

    chunk.decoder.register_forward_pre_hook(remember, with_kwargs=True)
    for layer in chunk.decoder.layers[recompute.layers :]:
        layer.register_forward_pre_hook(hand_over, with_kwargs=True)
