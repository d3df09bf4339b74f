"""Seconds in which an engine generates (pure): a roofline of prefill and decode.

One replica of the attention part is looked at; all replicas of an engine generate at the same time.
"""

import math
from dataclasses import dataclass

from grpo_operator.api.catalog.gpus import Gpu
from grpo_operator.plan.planner.efficiency import MEASURED, Efficiency
from grpo_operator.plan.planner.engines.memory import engine_weights, kv_bytes_per_token
from grpo_operator.plan.planner.engines.shape import EngineShape
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import MlaShape, ModelShape

_BF16 = 2


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine on its hardware. ``gpus_per_node``: of its GPUs. ``deterministic``: its kernels are."""

    model: ModelShape
    shape: EngineShape
    gpu: Gpu
    gpus_per_node: int
    efficiency: Efficiency = MEASURED
    deterministic: bool = False

    def decode_seconds(self, running: float, context: float) -> float:
        """Return the seconds of one token of each of ``running`` sequences of one attention replica.

        ``context``: mean number of tokens that the sequences have.
        """
        if running <= 0:
            return 0.0
        efficiency = self.efficiency
        read = self._weights_read(running) + running * context * kv_bytes_per_token(self.model, self.shape)
        memory = read / (self.gpu.bandwidth * efficiency.memory)
        compute = self._flops(running, context) / (self.gpu.flops * efficiency.engine_flops)
        start = self._layers() + running * efficiency.decode_sequence
        return start + max(memory, compute) + self._traffic(running)

    def _layers(self) -> float:
        """Return the seconds that a token's layers take beside the bytes that they read."""
        efficiency, model = self.efficiency, self.model
        if self.deterministic:
            return model.layers * efficiency.deterministic_layer
        dense = model.dense_layers
        return dense * efficiency.decode_layer + (model.layers - dense) * efficiency.decode_expert_layer

    def prefill_seconds(self, tokens: float, length: float) -> float:
        """Return the seconds to read ``tokens`` tokens of prompts of ``length`` tokens in one replica."""
        efficiency = self.efficiency
        compute = self._flops(tokens, length / 2) / (self.gpu.flops * efficiency.engine_flops)
        return compute + self._traffic(tokens)

    def _weights_read(self, running: float) -> float:
        """Return the bytes of weights on one GPU that a batch touches; few tokens do not reach all
        experts.
        """
        weights = engine_weights(self.model, self.shape)
        experts = self.model.experts
        if experts is None:
            return weights.total
        everyone = running * self.shape.attention_data  # the tokens of all replicas meet at the experts
        touched = 1 - math.pow(1 - experts.top_k / experts.count, everyone)
        return weights.total - weights.experts * (1 - touched)

    def _flops(self, tokens: float, context: float) -> float:
        """Return the operations of one GPU for ``tokens`` tokens of its replica."""
        model, shape = self.model, self.shape
        total = parameters.total(model)
        attention = sum(parameters.attention(model).total for _ in range(model.layers))
        dense = total.split + total.whole - parameters.embedding(model).total
        each = 2.0 * attention / shape.attention_tensor
        each += 2.0 * max(dense - attention, 0) / shape.dense_tensor
        if model.experts is not None:
            share = model.experts.top_k / model.experts.count
            # Tokens of all replicas are computed by all GPUs of the engine.
            each += 2.0 * total.expert * share * shape.attention_data / shape.tensor
        each += 2.0 * model.layers * self._attention_width() * context / shape.attention_tensor
        return tokens * each

    def _attention_width(self) -> float:
        shape = self.model.attention
        if isinstance(shape, MlaShape):  # decoding attends to the compressed keys and values
            return self.model.heads * (2 * shape.kv_rank + shape.rope)
        return 2 * self.model.heads * shape.head

    def _traffic(self, tokens: float) -> float:
        """Return the seconds of the traffic between the engine's GPUs for ``tokens`` tokens of a replica."""
        model, shape = self.model, self.shape
        stream = tokens * model.hidden * _BF16
        link = self.efficiency.link
        seconds = 0.0
        if shape.attention_tensor > 1:  # two all-reduces in each layer
            speed = self.gpu.nvlink if shape.attention_tensor <= self.gpus_per_node else self.gpu.network
            seconds += 4 * stream * model.layers / (speed * link)
        if model.experts is not None and shape.attention_data > 1:
            copies = self._copies()
            inside = min(self.gpus_per_node / shape.tensor, 1.0)
            each = (1 - inside) / self.gpu.network + inside / self.gpu.nvlink
            seconds += copies * stream * model.layers * each / link
        return seconds

    def _copies(self) -> float:
        """Return how many times a token's hidden state travels: to its experts, and their sum back.

        Without an all-to-all backend each GPU gathers the tokens of all replicas and reduces the results.
        """
        assert self.model.experts is not None
        if self.shape.all_to_all:
            return 2 * min(self.model.experts.top_k, self.shape.tensor)
        return 2 * (self.shape.attention_data - 1)
