"""Training the layer of multi-token prediction.

It learns what the policy says, so that engines may draft with it; the policy learns nothing from it:
hidden states, embedding and output projection are constants to it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding

from grpo_worker.data.micro_batch import MicroBatch
from grpo_worker.megatron.model import vocab_parallel
from grpo_worker.megatron.model.mtp_layer import NAME
from grpo_worker.megatron.training.runner import context_slice, context_whole, packed_params

FACTOR = 0.1  # of its loss beside the policy's; DeepSeek-V3's own at the end of its training


class MultiTokenPrediction:
    """What the layer of a rank's chunks guesses, and how far off it is."""

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
    def begin(self) -> None:
        """Before an update: bring the first stage's embedding to the last. Collective."""
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return
        if self._first is None and self._last is None:
            return
        holder = self._embedding if self._first is None else self._first.embedding
        source = parallel_state.get_pipeline_model_parallel_first_rank()
        dist.broadcast(holder.word_embeddings.weight, source, group=parallel_state.get_embedding_group())

    def loss(self, micro: MicroBatch, width: int) -> torch.Tensor:
        """Mean of -log p over the answers' tokens, each guessed from two before; follows the forward of
        ``micro`` on the last stage."""
        rows = self.rows(micro, width)
        return -(micro.columns["weights"] * rows).sum()

    def rows(self, micro: MicroBatch, width: int) -> torch.Tensor:
        """Log-probability of each token guessed from two before: [rows, width], 0 in the first two
        columns."""
        logits = self.logits(micro)
        after_next = context_slice(micro.labels.roll(-1, 1))
        found = context_whole(vocab_parallel.log_probs(logits, after_next, 1.0))
        rows = micro.to_rows(found.roll(1, 1), width)
        return torch.nn.functional.pad(rows[:, 2:], (2, 0))

    def logits(self, micro: MicroBatch) -> torch.Tensor:
        """[b, s / cp, vocab / tp]: of the token after the next."""
        model: Any = self._last
        with torch.no_grad():
            embedded = self._embedding(context_slice(micro.labels), context_slice(micro.position_ids))
        hidden = getattr(model, NAME)(self._hidden, embedded, packed_params(micro))
        logits, _ = model.output_layer(hidden, weight=model.output_layer.weight.detach())
        found: torch.Tensor = logits.transpose(0, 1).contiguous()
        return found


def _copy_of_embedding(model: Any, hf: dict[str, Any]) -> Any:
    """The last stage has none of its own; this one is no part of the model."""
    made = LanguageModelEmbedding(
        model.config, hf["vocab_size"], hf["max_position_embeddings"], position_embedding_type="rope"
    )
    where = model.output_layer.weight.device
    return made.to(where).requires_grad_(False)
