"""Training of the multi-token-prediction (MTP) layer.

The layer learns to predict the policy's responses, so that engines can draft tokens with it. The policy
itself is not affected: hidden states, embedding and output projection are constants in this loss.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

from grpo_worker.data.micro_batch import MicroBatch
from grpo_worker.megatron.families.base import MTP_LAYER
from grpo_worker.megatron.model import vocab_parallel
from grpo_worker.megatron.training.runner import context_slice, packed_params, router_slice

FACTOR = 0.1  # weight of this loss beside the policy's; DeepSeek-V3's value at the end of its training


class MultiTokenPrediction:
    """Predictions and loss of the MTP layer in a rank's chunks."""

    def __init__(self, chunks: Sequence[Any], hf: dict[str, Any]) -> None:
        self._first = next((chunk for chunk in chunks if chunk.pre_process), None)
        self._last = next((chunk for chunk in chunks if chunk.post_process), None)
        self._embedding: Any = None
        if self._last is None:
            return
        self._last.decoder.register_forward_hook(self._keep)
        self._embedding = self._first.embedding if self._first else _copy_of_embedding(self._last, hf)

    def _keep(self, _module: Any, _inputs: Any, output: torch.Tensor) -> None:
        self._hidden = output.detach()

    @torch.no_grad()
    def broadcast_embedding(self) -> None:
        """Copy the first stage's embedding to the last stage, before an update. Collective."""
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return
        if self._first is None and self._last is None:
            return
        holder = self._embedding if self._first is None else self._first.embedding
        source = parallel_state.get_pipeline_model_parallel_first_rank()
        dist.broadcast(holder.word_embeddings.weight, source, group=parallel_state.get_embedding_group())

    def loss(self, micro: MicroBatch, width: int) -> torch.Tensor:
        """Return the weighted sum of -log p over this rank's tokens, each predicted two tokens ahead.

        Call it on the last stage after the forward pass of ``micro``, whose hidden states it uses.
        """
        return -(micro.next_weights() * micro.loss_rows(self.log_probs(micro), width)).sum()

    def log_probs(self, micro: MicroBatch) -> torch.Tensor:
        """Return the log-probability of the token after the next, [b, s / cp]."""
        after_next = context_slice(micro, micro.labels.roll(-1, 1))
        return vocab_parallel.log_probs(self.logits(micro), after_next, 1.0)

    def logits(self, micro: MicroBatch) -> torch.Tensor:
        """Return the logits of the token after the next, [b, s / cp, vocab / tp]."""
        model: Any = self._last
        with torch.no_grad():
            labels, positions = context_slice(micro, micro.labels), context_slice(micro, micro.position_ids)
            embedded = self._embedding(labels, positions)
        # The last token of a row has no next one, which the layer would take from another row.
        padding = router_slice(micro, micro.padding(ahead=1))
        hidden = getattr(model, MTP_LAYER)(self._hidden, embedded, packed_params(micro), padding)
        logits, _ = model.output_layer(hidden, weight=model.output_layer.weight.detach())
        batch_first: torch.Tensor = logits.transpose(0, 1).contiguous()
        return batch_first


def _copy_of_embedding(model: Any, hf: dict[str, Any]) -> Any:
    """Create an embedding for a last stage that has none; it is not part of the model's state."""
    embedding = LanguageModelEmbedding(
        model.config, hf["vocab_size"], hf["max_position_embeddings"], position_embedding_type="rope"
    )
    return embedding.to(model.output_layer.weight.device).requires_grad_(False)
