"""Token dispatcher of the MoE layers: how tokens reach the ranks of their experts."""

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.moe import TokenDispatcher
from grpo_operator.api.v1alpha1.trainer import KernelChoice

log = logging.getLogger(__name__)

ALLTOALL: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
DEEPEP: dict[str, Any] = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": "deepep"}
# Fields of Megatron-Core that a job passes through, and that only the all-to-all has.
_ALLTOALL_ONLY = ("moe_shared_expert_overlap", "moe_pad_expert_input_to_capacity")
# What Megatron-Core imports of DeepEP; if a name is missing, it ignores the package.
_NAMES = {"deep_ep": ("Buffer",), "deep_ep.utils": ("EventHandle", "EventOverlap")}
_NVLINK_RANKS = 8  # DeepEP divides the ranks of a larger group into nodes of this size


@dataclass(frozen=True, slots=True)
class DispatcherChoice:
    """What a job asks for. ``gpus_per_node``: of the training pool."""

    asked: TokenDispatcher = TokenDispatcher.AUTO
    gpus_per_node: int = 8


AUTO = DispatcherChoice()


@dataclass(frozen=True, slots=True)
class _Obstacle:
    """Why DeepEP cannot be used, and what would help."""

    reason: str
    remedy: str


def dispatcher_fields(
    choice: DispatcherChoice, kernels: KernelChoice, layout: Layout, passed: Mapping[str, Any]
) -> dict[str, Any]:
    """Return Megatron-Core's fields for the dispatcher of a model with experts.

    ``auto``: DeepEP where nothing is in its way. ``kernels``: of the layers. ``passed``: the fields of
    spec.trainer.megatron. Raises ValueError if the job asks for DeepEP and it cannot be used.
    """
    if choice.asked is TokenDispatcher.ALLTOALL:
        return ALLTOALL
    obstacle = _unsuited(choice, kernels, layout, passed) or _missing(layout.expert * layout.expert_tensor)
    if obstacle is None:
        log.info("tokens reach their experts through DeepEP")
        return DEEPEP
    if choice.asked is TokenDispatcher.DEEPEP:
        raise ValueError(
            f"spec.trainer.moe.dispatcher=deepep: {obstacle.reason}: {obstacle.remedy}, or set the field to "
            "auto or alltoall"
        )
    log.info("tokens reach their experts by alltoall, not through DeepEP: %s", obstacle.reason)
    return ALLTOALL


def _unsuited(
    choice: DispatcherChoice, kernels: KernelChoice, layout: Layout, passed: Mapping[str, Any]
) -> _Obstacle | None:
    """Return why the job cannot use DeepEP (pure)."""
    if kernels is not KernelChoice.TRANSFORMER_ENGINE:
        reason = "the layers are built without Transformer Engine's kernels, which permute what DeepEP brings"
        return _Obstacle(reason, "use GPUs and spec.trainer.kernels=transformer-engine")
    if layout.expert == 1:
        return _Obstacle(
            "no token leaves its rank with spec.trainer.parallelism.expert=1", "set expert above 1"
        )
    for name in _ALLTOALL_ONLY:
        if passed.get(name):
            reason = f"spec.trainer.megatron.{name} works by alltoall only"
            return _Obstacle(reason, f"remove {name}")
    size, gpus = layout.expert * layout.expert_tensor, choice.gpus_per_node
    if gpus % min(size, _NVLINK_RANKS):
        reason = f"it needs {min(size, _NVLINK_RANKS)} of the {size} ranks that share experts on each node, "
        return _Obstacle(
            f"{reason}and spec.trainer.gpusPerNode is {gpus}", "change spec.trainer.parallelism.expert"
        )
    return None


def _missing(size: int) -> _Obstacle | None:
    """Return why the installed DeepEP cannot connect ``size`` ranks."""
    try:
        modules = {module: importlib.import_module(module) for module in _NAMES}
    except (ImportError, OSError) as error:
        reason = f"the package deep_ep cannot be imported: {error}"
        return _Obstacle(reason, "use a trainer image that has DeepEP")
    absent = [f"{m}.{name}" for m, names in _NAMES.items() for name in names if not hasattr(modules[m], name)]
    if absent:
        reason = f"the package deep_ep lacks {', '.join(absent)}, which Megatron-Core imports"
        return _Obstacle(reason, "use a trainer image that has DeepEP 1")
    try:
        modules["deep_ep"].Buffer.get_dispatch_config(size)
    except AssertionError as error:  # how DeepEP refuses a number of ranks
        return _Obstacle(f"the package deep_ep: {error}", "change spec.trainer.parallelism.expert")
    return None
