"""Differences between the versions of Megatron-Core that the trainer works with: 0.16.1 and 0.19.2.

Each is found by what the installed one has, not by its number. With either, parameters have the same Hugging
Face names and the same keys in checkpoints.
"""

from dataclasses import fields
from functools import partial
from inspect import signature
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayerSubmodules


def found(owner: Any, *names: str) -> str:
    """Return the first of the names, of 0.16.1 and of later versions, that the owner has."""
    name = next((name for name in names if hasattr(owner, name)), "")
    assert name, f"megatron-core has none of {', '.join(names)} in {owner.__name__}"
    return name


def submodules_of(spec: Any) -> Any:
    """Return the submodules of an MLP's specification: a ModuleSpec, or later a partial of a class."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules


def _mtp_inner_layer() -> str:
    names = {field.name for field in fields(MultiTokenPredictionLayerSubmodules)}
    return "mtp_model_layer" if "mtp_model_layer" in names else "transformer_layer"


# Attribute of an MTP layer, and of its submodules, that is its transformer layer.
MTP_INNER_LAYER = _mtp_inner_layer()

# Arguments of dist_checkpointing.save; later versions would else use NVIDIA's resiliency extension.
OWN_WRITERS: dict[str, Any] = (
    {"async_strategy": "mcore"} if "async_strategy" in signature(dist_checkpointing.save).parameters else {}
)
