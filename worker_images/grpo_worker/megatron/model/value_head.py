"""A transformer that says one value for each token instead of logits."""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

from grpo_worker.megatron.conversion.readers import WeightReader

NAME = "score.weight"


class ValueHead(torch.nn.Module):
    """Takes the place of the output layer: [s (/ tp), b, hidden] -> [s, b, 1] fp32.

    Its weight is whole on every tensor-parallel rank.
    """

    def __init__(self, config: Any, like: torch.Tensor) -> None:
        super().__init__()
        self.sequence_parallel = bool(config.sequence_parallel)
        self.weight = torch.nn.Parameter(like.new_zeros(1, config.hidden_size))
        # Marks the gradient for the all-reduce over the TP group.
        self.weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        values = torch.nn.functional.linear(hidden, self.weight).float()
        if self.sequence_parallel:
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def with_value_heads(chunks: list[Any]) -> list[Any]:
    """Replace the output layer of the last chunk of the last stage."""
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer = ValueHead(chunk.config, next(chunk.decoder.parameters()))
            chunk.share_embeddings_and_output_weights = False
    return chunks


class ValueHeadWeights:
    """A reader that knows a value head too: the checkpoint's own, or zeros, so that a critic begins
    by expecting nothing."""

    def __init__(self, reader: WeightReader, hidden: int) -> None:
        self._reader = reader
        self._hidden = hidden

    def shape(self, name: str) -> tuple[int, ...]:
        try:
            return self._reader.shape(name)
        except KeyError:
            if name != NAME:
                raise
            return (1, self._hidden)

    def read(self, name: str, dim: int, offset: int, length: int) -> torch.Tensor:
        try:
            return self._reader.read(name, dim, offset, length)
        except KeyError:
            if name != NAME:
                raise
            return torch.zeros(1, self._hidden).narrow(dim, offset, length)
