"""Offload of a job to host memory, from its spec and its model (pure)."""

from collections.abc import Sequence

from grpo_operator.api.v1alpha1.offload import OffloadModule, OffloadSpec, goes_with
from grpo_operator.api.v1alpha1.recompute import Recompute, RecomputeKind
from grpo_operator.api.v1alpha1.trainer import TrainerSpec
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.offloaded import missing

Option = tuple[Recompute, OffloadSpec]

_FIELD = "spec.trainer.offload"


def offload_levels(
    trainer: TrainerSpec, model: ModelShape | None, recomputes: Sequence[Recompute]
) -> tuple[tuple[Option, ...], ...]:
    """Return what the ranks may recompute and offload: each level only where none before it fits.

    ``recomputes``: among which the planner chooses. ``model``: None if the operator does not know it. Raises
    ValueError, with field, value and remedy, for modules that the model does not have, and for what only the
    model determines.
    """
    given = trainer.offload.model_copy(update={"auto": False})
    if trainer.offload.auto and model is None:
        raise ValueError(
            f"{_FIELD}.auto=true: the operator cannot read the model: set spec.model.architecture, or "
            "offload.optimizer and offload.activations"
        )
    modules = given.activations or []
    texts = [text for module in modules if model is not None and (text := missing(model, module))]
    if texts:
        raise ValueError(f"{_FIELD}.activations=[{', '.join(modules)}]: {'; '.join(texts)}")
    plain = tuple((recompute, given) for recompute in recomputes if _possible(recompute, modules))
    if not plain:
        raise ValueError(
            f"{_FIELD}.activations=[{', '.join(modules)}]: recompute={recomputes[0]} drops or needs them: "
            f"set spec.trainer.recomputeModules without {_causes(recomputes[0], modules)}, or remove the "
            "modules from activations"
        )
    if not trainer.offload.auto or model is None:
        return (plain,)
    moved = [(r, given.model_copy(update={"optimizer": True})) for r, _ in plain if not given.optimizer]
    copied = [option for each in plain for option in _with_activations(trainer, model, *each)]
    both = [option for each in moved for option in _with_activations(trainer, model, *each)]
    return tuple(tuple(level) for level in (plain, [*moved, *copied], both) if level)


def _possible(recompute: Recompute, modules: Sequence[OffloadModule]) -> bool:
    if recompute.kind is RecomputeKind.FULL:
        return not modules
    return all(goes_with(module, recompute.modules) for module in modules)


def _causes(recompute: Recompute, modules: Sequence[OffloadModule]) -> str:
    """Return the recomputed modules with which ``modules`` do not go."""
    causes = (r for r in recompute.modules if not all(goes_with(module, (r,)) for module in modules))
    return " and ".join(causes)


def _with_activations(
    trainer: TrainerSpec, model: ModelShape, recompute: Recompute, offload: OffloadSpec
) -> list[Option]:
    """Return the option with all activations that go with what is recomputed; empty where none does."""
    impossible = not trainer.groups_experts or trainer.moe.overlap_communication
    if offload.activations or recompute.kind is RecomputeKind.FULL or impossible:
        return []
    return [(recompute, offload.model_copy(update={"activations": offloadable(model, recompute)}))]


def offloadable(model: ModelShape, recompute: Recompute) -> list[OffloadModule]:
    """Return all modules that the model has and that go with what is recomputed."""
    modules = [m for m in OffloadModule if goes_with(m, recompute.modules) and not missing(model, m)]
    if OffloadModule.CORE_ATTN not in modules:
        modules.remove(OffloadModule.ATTN_PROJ)  # they share a tensor
    return modules
