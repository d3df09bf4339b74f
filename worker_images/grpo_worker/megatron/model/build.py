"""Creation of the process groups and model chunks of one rank."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.offload import OffloadModule
from grpo_operator.api.v1alpha1.recompute import NOTHING, Recompute
from grpo_operator.api.v1alpha1.trainer import KernelChoice, Precision
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.megatron.model.activation_offload import offload_fields
from grpo_worker.megatron.model.hf_config import mcore_config
from grpo_worker.megatron.model.kernels import Kernels, kernels, mark_whole, precision_fields
from grpo_worker.megatron.model.layer_spec import block_spec
from grpo_worker.megatron.model.mtp_layer import add_layer
from grpo_worker.megatron.model.recompute import mask_kept_layers, recompute_fields
from grpo_worker.megatron.model.token_dispatcher import AUTO, DispatcherChoice, dispatcher_fields


def initialize_parallel(layout: Layout, seed: int) -> None:
    """Create Megatron-Core's process groups and seed every generator of this rank."""
    virtual = layout.virtual_pipeline
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
    )
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def device() -> torch.device:
    """Return the device on which this rank computes."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU


_CPU = torch.device("cpu")


def build_chunks(
    hf: dict[str, Any],
    layout: Layout,
    dtype: torch.dtype = torch.float32,
    recompute: Recompute = NOTHING,
    mtp: bool = False,
    choice: KernelChoice = KernelChoice.LOCAL,
    precision: Precision = Precision.BF16,
    passed: Mapping[str, Any] | None = None,
    dispatcher: DispatcherChoice = AUTO,
    offloaded: tuple[OffloadModule, ...] = (),
    **overrides: Any,
) -> list[GPTModel]:
    """Build the model chunks of this rank's pipeline stage; the weights are not loaded.

    Returns one chunk, or ``layout.virtual_pipeline`` chunks. ``recompute``: what the backward pass computes
    again. ``offloaded``: modules whose activations wait for it in host memory. ``mtp``: add the layer of
    multi-token prediction to the last stage. ``choice``, ``precision``: of the kernels of the layers.
    ``passed``: the fields of spec.trainer.megatron. ``dispatcher``: of tokens to their experts. Raises
    ValueError for kernels and dispatchers that are not there, for modules that the kernels cannot recompute
    or offload, and for fields that Megatron-Core refuses.
    """
    chosen = kernels(choice)
    fields = chosen.fields | precision_fields(chosen, precision)
    if "num_moe_experts" in family_of(hf).fields(hf):
        fields |= dispatcher_fields(dispatcher, chosen.name, layout, passed or {})
    fields |= recompute_fields(recompute, chosen.grouped) | offload_fields(offloaded, chosen.name) | overrides
    config = mcore_config(hf, layout, dtype, passed, **fields)
    virtual = layout.virtual_pipeline
    stages = range(virtual) if virtual > 1 else [None]
    chunks = [_chunk(hf, config, chosen, stage, mtp) for stage in stages]
    for chunk in chunks:
        mask_kept_layers(chunk, recompute)
    return chunks


def _chunk(
    hf: dict[str, Any], config: Any, chosen: Kernels, vp_stage: int | None, mtp: bool
) -> GPTModel:  # fmt: skip
    ends: dict[str, Any] = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    model = GPTModel(
        config,
        block_spec(config, chosen, vp_stage),
        vocab_size=hf["vocab_size"],
        max_sequence_length=hf["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=hf.get("rope_theta") or (hf.get("rope_parameters") or {})["rope_theta"],
        **family_of(hf).rotary(hf),
        share_embeddings_and_output_weights=bool(hf.get("tie_word_embeddings")),
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        vp_stage=vp_stage,
    )
    if mtp and model.post_process:
        add_layer(model, vp_stage, chosen)
    if torch.cuda.is_available():
        model.cuda()  # a few modules of Megatron-Core are created on the host
    mark_whole(model, chosen)
    return model
