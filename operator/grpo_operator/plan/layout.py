"""Layout of the training pool from the spec (pure)."""

from grpo_operator.api.grpojob import GRPOJobSpec
from grpo_operator.api.status import LayoutStatus

PRESET_LAYERS = {"preset:tiny-moe": 3}


def resolve_layout(spec: GRPOJobSpec) -> LayoutStatus:
    """The computed layout. ``stages`` is empty when the number of layers is not known here."""
    sizes = spec.trainer.parallelism
    world = spec.trainer.nodes * spec.trainer.gpus_per_node
    layers = PRESET_LAYERS.get(spec.model.path, 0)
    return LayoutStatus(
        world=world,
        data=world // (sizes.tensor * sizes.pipeline * sizes.context),
        tensor=sizes.tensor,
        pipeline=sizes.pipeline,
        context=sizes.context,
        expert=sizes.expert,
        expert_tensor=sizes.expert_tensor,
        stages=[layers // sizes.pipeline] * sizes.pipeline if layers else [],
    )


def unknown_preset(spec: GRPOJobSpec) -> str | None:
    """Message for a preset that does not exist, or None."""
    path = spec.model.path
    if path.startswith("preset:") and path not in PRESET_LAYERS:
        known = ", ".join(sorted(PRESET_LAYERS))
        return f"spec.model.path: unknown preset {path!r}: use one of {known}, or an absolute path"
    return None


def indivisible_layers(spec: GRPOJobSpec) -> str | None:
    """Message when the layers of a preset cannot be cut into equal stages, or None."""
    layers, stages = PRESET_LAYERS.get(spec.model.path, 0), spec.trainer.parallelism.pipeline
    if layers % stages:
        return (
            f"spec.trainer.parallelism.pipeline={stages}: {layers} layers of {spec.model.path} "
            f"cannot be cut into {stages} equal stages: use a divisor of {layers}"
        )
    return None
