"""One rank's share of PPO's critic: values of tokens and optimizer steps on them."""

import torch

from grpo_operator.api.v1alpha1.trainer import OptimizerSpec
from grpo_worker.algorithms.losses import value_loss
from grpo_worker.data.micro_batch import Batch, MicroBatch
from grpo_worker.megatron.conversion import hf_mapping
from grpo_worker.megatron.conversion.value_head_reader import ValueHeadWeights
from grpo_worker.megatron.model.build import build_chunks
from grpo_worker.megatron.model.value_head import with_value_heads
from grpo_worker.megatron.optim.optimizer import Trainable
from grpo_worker.megatron.training.runner import Runner, context_whole
from grpo_worker.megatron.training.setup import ModelSetup


class CriticModel:
    """A model of the policy's architecture with a value head, in the policy's layout."""

    def __init__(self, setup: ModelSetup, optimizer: OptimizerSpec, total_steps: int) -> None:
        self.layout = setup.layout
        untied = setup.hf | {"tie_word_embeddings": False}
        chunks = with_value_heads(build_chunks(untied, setup.layout, setup.dtype, setup.recompute))
        hf_mapping.load(chunks, setup.family, ValueHeadWeights(setup.reader, setup.hf["hidden_size"]))
        self.trainable = Trainable(chunks, optimizer, total_steps, setup.offload)
        self._runner = Runner(setup.layout, setup.batching)

    def values(self, batch: Batch) -> Batch:
        """Expected return before each token.

        batch: input_ids [b, s] int64, right-padded; attention_mask [b, s]. Returns values [b, s]
        fp32, 0 at column 0 and in the padding; nothing outside the last pipeline stage.
        """
        for chunk in self.trainable.chunks:
            chunk.eval()
        with self.trainable.weights.here():
            return self._runner.rows(self.trainable.chunks, batch, {"values": value_rows})

    def update(self, batch: Batch, cliprange: float) -> dict[str, float]:
        """One optimizer step on this data-parallel rank's share of a mini-batch.

        batch [b, s]: input_ids, attention_mask, response_mask, values (when sampled), returns,
        weights (of the *global* mini-batch). Returns metrics of the global mini-batch.
        """

        def losses(output: torch.Tensor, part: MicroBatch, width: int) -> tuple[torch.Tensor, torch.Tensor]:
            rows, found = part.columns, value_rows(output, part, width)
            tokens, clipped = value_loss(found, rows["values"], rows["returns"], cliprange)
            weight = rows["weights"]
            loss = (weight * tokens).sum()
            figures = (loss, (weight * clipped).sum(), (weight * found).sum())
            return loss, torch.stack([figure.detach() for figure in figures])

        found = self._runner.update(self.trainable, batch, losses, ("vf_loss", "vf_clipfrac", "vpred_mean"))
        return {f"critic/{name}": value for name, value in found.items()}


def value_rows(output: torch.Tensor, micro: MicroBatch, width: int) -> torch.Tensor:
    """What a value head says before each token, as rows."""
    return micro.to_rows(context_whole(output[..., 0]), width)
