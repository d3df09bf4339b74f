"""Routing replay (R3): the trainer's routers take the experts that the engines took.

An expert that the trainer would choose differently, by rounding alone, changes a token's probability
by far more than rounding does; replaying the choice keeps both sides on the same function.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from grpo_worker.data.micro_batch import MicroBatch
from grpo_worker.megatron.runner import context_slice

COLUMN = "routed_experts"


class RoutingReplay:
    """The routers of a rank's model chunks, which must be built with ``moe_enable_routing_replay``."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        # Megatron-Core collects every instance for ever; we keep our own.
        RouterReplay.clear_global_router_replay_instances()
        config = chunks[0].config
        frequency = config.moe_layer_freq
        self._order = {layer: i for i, layer in enumerate(i for i, moe in enumerate(frequency) if moe)}
        self._experts, self._topk = config.num_moe_experts, config.moe_router_topk
        self._sequence_parallel = config.sequence_parallel
        self._routers = {id(chunk): list(_routers(chunk)) for chunk in chunks}

    @contextmanager
    def around(self, model: Any, micro: MicroBatch) -> Iterator[None]:
        """Replay in the forward inside, and in the recomputation that its backward may make."""
        if COLUMN not in micro.columns:
            yield
            return
        chunk = model if id(model) in self._routers else model.module
        chosen = self._local(micro)
        for layer, router in self._routers[id(chunk)]:
            router.set_target_indices(chosen[:, self._order[layer]].contiguous())
            router.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield
        for _, router in self._routers[id(chunk)]:
            router.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)

    def clear(self) -> None:
        """Back to the routers' own choice."""
        for routers in self._routers.values():
            for _, router in routers:
                router.clear_indices()
                router.clear_router_replay_action()

    def _local(self, micro: MicroBatch) -> torch.Tensor:
        """[tokens of this rank, expert layers, k] int64, in the order in which routers see tokens."""
        rows = micro.columns[COLUMN].long()
        shape = micro.input_ids.shape
        # Tokens that no engine ran, at the end of a row and in the padding: spread them evenly.
        places = torch.arange(shape[1], device=rows.device)[:, None] * self._topk
        fill = (places + torch.arange(self._topk, device=rows.device)) % self._experts
        whole = fill[None, :, None, :].repeat(shape[0], 1, len(self._order), 1)
        micro.spread(rows, whole)
        tokens = context_slice(whole).transpose(0, 1)  # [s, b, layers, k]
        if self._sequence_parallel:
            size = parallel_state.get_tensor_model_parallel_world_size()
            tokens = tokens.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
        return tokens.flatten(0, 1)


def _routers(chunk: Any) -> Iterator[tuple[int, Any]]:
    for layer in chunk.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if isinstance(router, TopKRouter):
            yield layer.layer_number - 1, router.router_replay
