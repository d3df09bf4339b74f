"""Balance of the routers' expert choices, over all ranks."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from grpo_worker.megatron.model.build import device


class ExpertLoad:
    """Token counts of each expert during training forward passes, without the padding.

    Empty for dense models.
    """

    def __init__(self, chunks: Sequence[Any]) -> None:
        config = chunks[0].config
        self._topk = config.moe_router_topk
        self._counts: dict[int, torch.Tensor] = {}
        self._shares: dict[int, torch.Tensor] = {}
        self._tokens: dict[int, torch.Tensor] = {}
        self._biases: dict[int, torch.Tensor] = {}
        self._shape = (config.num_layers, config.num_moe_experts or 0)
        self._paused = False
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                router = getattr(layer.mlp, "router", None)
                if isinstance(router, TopKRouter):
                    self._watch(layer.layer_number - 1, router)

    def _watch(self, layer: int, router: Any) -> None:
        self._counts[layer] = torch.zeros(self._shape[1], dtype=torch.float64, device=device())
        self._shares[layer] = torch.zeros_like(self._counts[layer])
        self._tokens[layer] = torch.zeros((), dtype=torch.float64, device=device())
        bias = getattr(router, "expert_bias", None)
        if bias is not None:
            self._biases[layer] = bias

        def count(module: Any, inputs: Any, outputs: Any) -> None:
            if module.training and torch.is_grad_enabled() and not self._paused:
                weights, chosen = outputs[0].detach(), outputs[1]
                real = ~inputs[1].reshape(-1, 1)
                self._counts[layer] += (chosen & real).sum(0)
                self._shares[layer] += (weights / weights.sum(1, keepdim=True) * real).sum(0)
                self._tokens[layer] += real.sum()

        router.register_forward_hook(count)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing in the passes inside."""
        self._paused = True
        yield
        self._paused = False

    def collect(self) -> dict[str, float]:
        """Return the figures since the last call, the same on every rank. Collective.

        moe/load_ratio/layer_N: tokens of the busiest expert / mean of all (1: even).
        moe/aux_loss/layer_N: number of experts x the sum over experts of (share of tokens x share of
        weights), the load-balancing loss without its coefficient (1: even).
        moe/dropped_tokens/layer_N: router choices that no expert processed.
        moe/bias_norm/layer_N: norm of the bias that balances the experts.
        """
        if not self._shape[1]:
            return {}
        table = self._table()
        figures: dict[str, float] = {}
        for layer in range(self._shape[0]):
            counts, shares = table[layer, :-2].reshape(2, -1)
            tokens, bias_norm = (float(value) for value in table[layer, -2:])
            if tokens == 0:
                continue  # a dense layer
            aux = len(counts) * (counts / counts.sum() * shares / tokens).sum()
            figures[f"moe/load_ratio/layer_{layer}"] = float(counts.max() / counts.mean())
            figures[f"moe/aux_loss/layer_{layer}"] = float(aux)
            figures[f"moe/dropped_tokens/layer_{layer}"] = tokens * self._topk - float(counts.sum())
            figures[f"moe/bias_norm/layer_{layer}"] = bias_norm
        ratios = [v for name, v in figures.items() if name.startswith("moe/load_ratio")]
        return figures | ({"moe/load_ratio/max": max(ratios)} if ratios else {})

    def _table(self) -> torch.Tensor:
        """Return [layers, 2 x experts + 2]: tokens and weight share of each expert, tokens, bias norm."""
        table = torch.zeros(self._shape[0], 2 * self._shape[1] + 2, dtype=torch.float64, device=device())
        for layer, counts in self._counts.items():
            table[layer, :-2] = torch.cat([counts, self._shares[layer]])
            table[layer, -2] = self._tokens[layer]
            counts.zero_()
            self._shares[layer].zero_()
            self._tokens[layer].zero_()
        dist.all_reduce(
            table, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        )
        for layer, bias in self._biases.items():
            table[layer, -1] = bias.norm()
        dist.all_reduce(table, group=parallel_state.get_pipeline_model_parallel_group())
        return table.cpu()
