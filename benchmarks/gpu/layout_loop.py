"""A bare Megatron-Core loop with layers of Transformer Engine, in any layout without virtual stages."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from kernel_models import free
from kernel_speed import FUSIONS
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron_loop import train_step, trainable
from update_cases import FP8, MICRO_BATCHES, UpdateCase

from grpo_worker.megatron.model.hf_config import mcore_config

_FP8_FIELDS = {"fp8": "e4m3", "fp8_recipe": "blockwise"}


def bare(case: UpdateCase) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Return a step of a language model with Megatron-Core's own layers and calls, and what frees it."""
    hf = case.hf
    fields = FUSIONS | (_FP8_FIELDS if case.precision is FP8 else {})
    config = mcore_config(hf, case.layout, torch.bfloat16, **fields)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=True)
    model = GPTModel(
        config, spec, hf["vocab_size"], case.tokens, position_embedding_type="rope",
        rotary_base=hf["rope_theta"], pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    ).cuda()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    ddp, optimizer = trainable(model, 1e-5)
    rank = parallel_state.get_data_parallel_rank()
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, hf["vocab_size"], (MICRO_BATCHES, case.tokens), generator=generator).cuda()
    labels, positions = ids.roll(-1, 1), torch.arange(case.tokens, device="cuda").expand_as(ids)
    columns = [_own_part(column, case.layout.context) for column in (ids, labels, positions)]

    def forward(data: Iterator[int], stage: Any) -> tuple[torch.Tensor, Any]:
        row = next(data)
        tokens, wanted, places = (column[row : row + 1] for column in columns)
        losses = stage(tokens, places, None, labels=wanted)
        return losses, lambda output: (output.mean(), {})

    step = partial(train_step, ddp, optimizer, forward, MICRO_BATCHES, case.tokens)
    return step, partial(_drop, ddp, optimizer)


def _own_part(column: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return this context-parallel rank's tokens: its chunk from the start, and its chunk from the end."""
    if ranks == 1:
        return column
    chunks, rank = column.chunk(2 * ranks, 1), parallel_state.get_context_parallel_rank()
    return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], 1)


def _drop(ddp: Any, optimizer: Any) -> None:
    for buffer in (*ddp.buffers, *ddp.expert_parallel_buffers):
        for tensor in (buffer.grad_data, buffer.param_data):
            tensor.untyped_storage().resize_(0)
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        inner.optimizer.state.clear()
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.untyped_storage().resize_(0)
    free()
