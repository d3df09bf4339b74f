"""Value head: one value for each token in place of logits."""

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

NAME = "score.weight"


class ValueHead(torch.nn.Module):
    """Replacement of the output layer: [s (/ tp), b, hidden] -> [s, b, 1] fp32.

    Every tensor-parallel rank holds the complete weight.
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
    """Replace the output layer of the last chunk of the last stage; return the chunks."""
    for chunk in chunks:
        if chunk.post_process:
            chunk.output_layer = ValueHead(chunk.config, next(chunk.decoder.parameters()))
            chunk.share_embeddings_and_output_weights = False
    return chunks
