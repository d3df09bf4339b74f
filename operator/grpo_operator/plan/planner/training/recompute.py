"""Recomputation of a job, from its spec and its model (pure)."""

from grpo_operator.api.v1alpha1.recompute import FULL, NOTHING, Recompute, RecomputeKind, RecomputeModule
from grpo_operator.api.v1alpha1.trainer import TrainerSpec
from grpo_operator.plan.planner.model.shape import MlaShape, ModelShape

# Large, and cheap to compute again, as the published recipes for DeepSeek-V3 choose them.
_DEFAULT = (
    RecomputeModule.LAYERNORM,
    RecomputeModule.MLA_UP_PROJ,
    RecomputeModule.MOE_ACT,
    RecomputeModule.MLP,
)
_FIELD = "spec.trainer.recomputeModules"


def recompute_options(trainer: TrainerSpec, model: ModelShape | None) -> tuple[Recompute, ...]:
    """Return what the ranks may recompute: one value, or several among which auto chooses.

    ``model``: None if the operator does not know it. Raises ValueError, with field, value and remedy, for
    modules that the model does not have, and for what only the model determines.
    """
    if trainer.recompute == "auto":
        if model is None:
            raise ValueError(
                "spec.trainer.recompute=auto: the operator cannot read the model: set "
                "spec.model.architecture, or none, selective or full"
            )
        parts = NOTHING, selective(model, trainer.groups_experts)
        return parts if trainer.moe.overlap_communication else (*parts, FULL)
    return (planned_recompute(trainer, model),)


def planned_recompute(trainer: TrainerSpec, model: ModelShape | None) -> Recompute:
    """Return what the ranks recompute, if it is not chosen automatically. Raises like the options."""
    if trainer.recompute != "selective":
        return trainer.recomputation()
    given = trainer.recompute_modules
    if given is None:
        if model is not None:
            return selective(model, trainer.groups_experts)
        raise ValueError(
            f"{_FIELD}: which modules there are depends on the model, and the operator cannot read it: "
            "set spec.model.architecture, or recomputeModules"
        )
    missing = [text for module in given if model is not None and (text := _missing(model, module))]
    if missing:
        raise ValueError(f"{_FIELD}=[{', '.join(given)}]: {'; '.join(missing)}")
    return trainer.recomputation()


def selective(model: ModelShape, grouped: bool) -> Recompute:
    """Return the default of selective recomputation.

    ``grouped``: the kernels compute the experts of a layer in one product.
    """
    modules = (m for m in _DEFAULT if not _missing(model, m) and (grouped or m != RecomputeModule.MOE_ACT))
    return Recompute(RecomputeKind.SELECTIVE, tuple(modules))


def _missing(model: ModelShape, module: RecomputeModule) -> str:
    """Return why the model has no such module, with the remedy, or ""."""
    experts = model.experts
    has = {
        RecomputeModule.MLA_UP_PROJ: (isinstance(model.attention, MlaShape), "no latent attention"),
        RecomputeModule.MLP: (model.dense_layers > 0, "no layer without experts"),
        RecomputeModule.MOE: (experts is not None, "no experts"),
        RecomputeModule.MOE_ACT: (experts is not None, "no experts"),
        RecomputeModule.SHARED_EXPERTS: (
            experts is not None and experts.shared_ffn > 0,
            "no shared experts",
        ),
    }
    there, text = has.get(module, (True, ""))
    return "" if there else f"a {model.model_type} model has {text}: remove {module}"
