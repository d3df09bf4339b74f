"""Router replay (R3): the trainer's routers use the experts that the engines chose.

Rounding alone can make the trainer choose another expert, and that changes a token's probability far more
than rounding itself. Replaying the engines' choice makes both sides compute the same function.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from grpo_worker.data.micro_batch import MicroBatch
from grpo_worker.megatron.model.build import device
from grpo_worker.megatron.training.runner import context_slice


class RoutingReplay:
    """Routers of a rank's model chunks, which must be built with ``moe_enable_routing_replay``.

    ``layers``: indices, among the model's expert layers, of those on this rank.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        # Megatron-Core keeps every instance in a global list and never removes one.
        RouterReplay.clear_global_router_replay_instances()
        config = chunks[0].config
        expert_layers = [layer for layer, moe in enumerate(config.moe_layer_freq) if moe]
        self._routers = {id(chunk): list(_routers(chunk)) for chunk in chunks}
        own = sorted(layer for routers in self._routers.values() for layer, _ in routers)
        self.layers = [expert_layers.index(layer) for layer in own]
        self._order = {layer: i for i, layer in enumerate(own)}  # place of each layer in ``routed``
        self._experts, self._topk = config.num_moe_experts, config.moe_router_topk
        self._sequence_parallel = config.sequence_parallel
        self._seen = torch.zeros(2, dtype=torch.float64, device=device())  # equal choices, choices

    @contextmanager
    def replaying(self, model: Any, micro: MicroBatch) -> Iterator[None]:
        """Replay the engines' experts in the forward pass inside, and when the backward recomputes it."""
        if micro.routed is None:
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

    @contextmanager
    def comparing(self, model: Any, micro: MicroBatch) -> Iterator[None]:
        """Count how often the routers choose the engines' experts in the forward pass inside."""
        if not self.layers:  # a pipeline stage without expert layers
            yield
            return
        chosen = self._local(micro, fill=False)
        known = chosen[:, 0, 0] >= 0
        hooks = []

        def count(router: Any, _inputs: Any, outputs: Any) -> None:
            engine_choice = chosen[known, self._order[router.layer_number - 1]]
            self._seen[0] += outputs[1][known].gather(1, engine_choice).sum()
            self._seen[1] += engine_choice.numel()

        chunk = model if id(model) in self._routers else model.module
        for layer in chunk.decoder.layers:
            router = getattr(layer.mlp, "router", None)
            if isinstance(router, TopKRouter):
                hooks.append(router.register_forward_hook(count))
        yield
        for hook in hooks:
            hook.remove()

    def agreement(self) -> float:
        """Return the share of equal choices since the last call, over all ranks. Collective."""
        dist.all_reduce(self._seen)
        equal, choices = self._seen.tolist()
        self._seen.zero_()
        return float(equal / max(choices, 1.0))

    def clear(self) -> None:
        """End the replay: the routers choose experts themselves again."""
        for routers in self._routers.values():
            for _, router in routers:
                router.clear_indices()
                router.clear_router_replay_action()

    def _local(self, micro: MicroBatch, fill: bool = True) -> torch.Tensor:
        """Return the experts of this rank's tokens, in the routers' order: [tokens, expert layers, k] int64.

        No engine ran the last token of a row or the padding. With ``fill`` these tokens are spread evenly
        over the experts, otherwise they get -1.
        """
        assert micro.routed is not None, "the batch has no routed experts"
        where, shape = micro.input_ids.device, micro.input_ids.shape
        first = torch.arange(shape[1], device=where)[:, None] * self._topk
        default = (first + torch.arange(self._topk, device=where)) % self._experts
        default = default if fill else torch.full_like(default, -1)
        whole = default[None, :, None, :].repeat(shape[0], 1, len(self._order), 1)
        for number, experts in enumerate(micro.routed):  # [layers, tokens - 1, k], small integers
            row, tokens = micro.place(number)
            ran = slice(tokens.start, tokens.stop - 1)
            chosen = torch.from_numpy(experts.astype(np.int16)).to(where)
            whole[row, ran] = chosen.transpose(0, 1).long()
        tokens_first = context_slice(micro, whole).transpose(0, 1)  # [s, b, layers, k]
        if self._sequence_parallel:
            size = parallel_state.get_tensor_model_parallel_world_size()
            tokens_first = tokens_first.chunk(size)[parallel_state.get_tensor_model_parallel_rank()]
        return tokens_first.flatten(0, 1)


def _routers(chunk: Any) -> Iterator[tuple[int, Any]]:
    for layer in chunk.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if isinstance(router, TopKRouter):
            yield layer.layer_number - 1, router.router_replay
