"""Functions that run on ranks: experts that are one module, as Transformer Engine keeps them."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core.post_training.modelopt.layers import Linear

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.moe import TokenDispatcher
from grpo_operator.api.v1alpha1.trainer import KernelChoice, Precision
from grpo_worker.megatron.conversion import hf_mapping
from grpo_worker.megatron.conversion.readers import SeededWeights
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.megatron.model.build import build_chunks, initialize_parallel
from grpo_worker.megatron.model.hf_config import mcore_config, with_fitting_fusions
from grpo_worker.megatron.model.kernels import kernels
from grpo_worker.megatron.model.token_dispatcher import DispatcherChoice
from support.tiny_models import tiny_model

Held = tuple[str, tuple[int, ...], int, int, bool, torch.Tensor]


class _GroupedLinear(torch.nn.Module):
    """Stand-in for Transformer Engine's grouped linear layer: it has the parameters and computes nothing.

    Theirs are not marked as parts of matrices that ranks share, so these are not either.
    """

    def __init__(self, weights: list[torch.Tensor]) -> None:
        super().__init__()
        for number, weight in enumerate(weights):
            self.register_parameter(f"weight{number}", torch.nn.Parameter(weight.detach().clone()))


def same_tensors(model: str, layout: dict[str, int]) -> tuple[list[Held], list[Held]]:
    """Return what this rank holds with an expert in a module, and with all of a layer in one."""
    hf, parallel = tiny_model(model), Layout(world=dist.get_world_size(), **layout)
    family = family_of(hf)
    initialize_parallel(parallel, 0)
    chunks = build_chunks(hf, parallel)
    hf_mapping.load(chunks, family, SeededWeights(hf, 3))
    apart = _held(chunks, family)
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            experts = getattr(layer.mlp, "experts", None)
            if experts is not None:
                layer.mlp.experts = _grouped(experts)
    together = _held(chunks, family)
    return apart, together


def _grouped(experts: Any) -> torch.nn.Module:
    module = torch.nn.Module()
    for linear in ("linear_fc1", "linear_fc2"):
        weights = [getattr(expert, linear).weight for expert in experts.local_experts]
        module.add_module(linear, _GroupedLinear(weights))
    return module


def _held(chunks: list[Any], family: Any) -> list[Held]:
    found = [
        (s.name, s.shape, s.dim, s.offset, s.owner, s.tensor.clone())
        for s in hf_mapping.shards(chunks, family)
    ]
    return sorted(found, key=lambda part: (part[0], part[3]))


def whole_projections() -> tuple[list[Held], list[Held]]:
    """Return what this rank holds, and the same with projections that call each rank's weight a part."""
    hf = tiny_model("deepseek_v3")
    layout, family = (
        Layout(world=dist.get_world_size(), tensor=dist.get_world_size(), expert=2),
        family_of(hf),
    )
    initialize_parallel(layout, 0)
    plain, init = build_chunks(hf, layout), Linear.__init__

    def marked(self: Any, *args: Any, **fields: Any) -> None:
        init(self, *args, **fields)
        self.weight.tensor_model_parallel, self.weight.partition_dim = True, 0  # as Transformer Engine does

    with patch.object(Linear, "__init__", marked):
        chunks = build_chunks(hf, layout)
    for built in (plain, chunks):
        hf_mapping.load(built, family, SeededWeights(hf, 3))
    return _held(plain, family), _held(chunks, family)


def fused_fields(model: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fusions that a configuration keeps of those that Transformer Engine's kernels ask for."""
    fusions = {"apply_rope_fusion": True, "moe_router_fusion": True}
    found = with_fitting_fusions(family_of(tiny_model(model)).fields(tiny_model(model)) | fusions | fields)
    return {name: found[name] for name in fusions}


def refused_precision() -> str:
    """Return the error of FP8 where there is no Transformer Engine."""
    initialize_parallel(Layout(world=1), 0)
    try:
        build_chunks(
            tiny_model("qwen3"), Layout(world=1), choice=KernelChoice.AUTO, precision=Precision.FP8_BLOCK128
        )
    except ValueError as error:
        return str(error)
    return ""


def build(choice: str) -> str:
    """Build a model; return the kernels of its layers, or the error."""
    initialize_parallel(Layout(world=1), 0)
    try:
        build_chunks(tiny_model("qwen3"), Layout(world=1), choice=KernelChoice(choice))
    except ValueError as error:
        return str(error)
    return str(kernels(KernelChoice(choice)).name)


def rendered(model: str, layout: dict[str, int], fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration that say how tokens reach their experts."""
    config = mcore_config(tiny_model(model), Layout(world=8, **layout), torch.bfloat16, **fields)
    names = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "moe_router_dtype")
    return {name: getattr(config, name) for name in names}


def refused_dispatcher(model: str) -> str:
    """Return why a model that asks for DeepEP cannot be built on a CPU."""
    layout = Layout(world=dist.get_world_size(), expert=dist.get_world_size())
    initialize_parallel(layout, 0)
    try:
        build_chunks(tiny_model(model), layout, dispatcher=DispatcherChoice(TokenDispatcher.DEEPEP))
    except ValueError as error:
        return str(error)
    return "built"
