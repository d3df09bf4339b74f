"""How evenly the routers use the experts, over all ranks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter

from grpo_worker.megatron.build import device


class ExpertLoad:
    """Counts the tokens of each expert in training forwards; nothing to count in dense models."""

    def __init__(self, chunks: Sequence[Any]) -> None:
        config = chunks[0].config
        self._counts: dict[int, torch.Tensor] = {}
        self._biases: dict[int, torch.Tensor] = {}
        self._shape = (config.num_layers, config.num_moe_experts or 0)
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                router = getattr(layer.mlp, "router", None)
                if isinstance(router, TopKRouter):
                    self._watch(layer.layer_number - 1, router)

    def _watch(self, layer: int, router: Any) -> None:
        self._counts[layer] = torch.zeros(self._shape[1], dtype=torch.float64, device=device())
        bias = getattr(router, "expert_bias", None)
        if bias is not None:
            self._biases[layer] = bias

        def count(module: Any, _inputs: Any, outputs: Any) -> None:
            if module.training and torch.is_grad_enabled():
                self._counts[layer] += outputs[1].sum(0)

        router.register_forward_hook(count)

    def take(self) -> dict[str, float]:
        """Figures since the last call, the same on every rank; collective.

        moe/load_ratio/layer_N: tokens of the busiest expert / mean of all (1: even).
        moe/bias_norm/layer_N: norm of the bias that balances the experts.
        """
        if not self._shape[1]:
            return {}
        table = self._table()
        figures: dict[str, float] = {}
        for layer in range(self._shape[0]):
            mean = float(table[layer, :-1].mean())
            if mean == 0:
                continue  # a dense layer
            figures[f"moe/load_ratio/layer_{layer}"] = float(table[layer, :-1].max()) / mean
            figures[f"moe/bias_norm/layer_{layer}"] = float(table[layer, -1])
        ratios = [v for name, v in figures.items() if name.startswith("moe/load_ratio")]
        return figures | ({"moe/load_ratio/max": max(ratios)} if ratios else {})

    def _table(self) -> torch.Tensor:
        """[layers, experts + 1]: counts, and the norm of the bias in the last column."""
        table = torch.zeros(self._shape[0], self._shape[1] + 1, dtype=torch.float64, device=device())
        for layer, counts in self._counts.items():
            table[layer, :-1] = counts
            counts.zero_()
        dist.all_reduce(table, group=parallel_state.get_tensor_and_data_parallel_group(True))
        for layer, bias in self._biases.items():
            table[layer, -1] = bias.norm()
        dist.all_reduce(table, group=parallel_state.get_pipeline_model_parallel_group())
        return table.cpu()
