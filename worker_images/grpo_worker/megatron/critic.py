"""One rank's share of PPO's critic: values of tokens and optimizer steps on them."""

from collections.abc import Sequence

import torch

from grpo_operator.api.trainer import OptimizerSpec
from grpo_worker.algorithms.losses import value_loss
from grpo_worker.data.micro_batch import Batch, MicroBatch
from grpo_worker.megatron import weights
from grpo_worker.megatron.build import build_chunks
from grpo_worker.megatron.optimizer import Trainable
from grpo_worker.megatron.runner import Runner, context_whole, to_device
from grpo_worker.megatron.setup import ModelSetup
from grpo_worker.megatron.sums import summed
from grpo_worker.megatron.value_head import ValueHeadWeights, with_value_heads


class CriticModel:
    """A model of the policy's architecture with a value head, in the policy's layout."""

    def __init__(self, setup: ModelSetup, optimizer: OptimizerSpec, total_steps: int) -> None:
        self.layout = setup.layout
        untied = setup.hf | {"tie_word_embeddings": False}
        chunks = with_value_heads(build_chunks(untied, setup.layout, setup.dtype, setup.recompute))
        weights.load(chunks, setup.family, ValueHeadWeights(setup.reader, setup.hf["hidden_size"]))
        self.trainable = Trainable(chunks, optimizer, total_steps)
        self._runner = Runner(setup.layout, setup.batching)

    def values(self, batch: Batch) -> Batch:
        """Expected return before each token.

        batch: input_ids [b, s] int64, right-padded; attention_mask [b, s]. Returns values [b, s]
        fp32, 0 at column 0 and in the padding; nothing outside the last pipeline stage.
        """
        for chunk in self.trainable.chunks:
            chunk.eval()
        return self._runner.rows(self.trainable.chunks, batch, {"values": _value_rows})

    def update(self, batch: Batch, cliprange: float) -> dict[str, float]:
        """One optimizer step on this data-parallel rank's share of a mini-batch.

        batch [b, s]: input_ids, attention_mask, response_mask, values (when sampled), returns,
        weights (of the *global* mini-batch). Returns metrics of the global mini-batch.
        """
        self.trainable.begin()
        width = batch["input_ids"].shape[1]
        micro = self._runner.micro_batches(to_device(batch))
        scale = len(micro) * self.layout.data
        sums: list[torch.Tensor] = []

        def losses(output: torch.Tensor, part: MicroBatch) -> torch.Tensor:
            rows = part.columns
            found = _value_rows(output, part, width)
            tokens, clipped = value_loss(found, rows["values"], rows["returns"], cliprange)
            weight = rows["weights"]
            loss = (weight * tokens).sum()
            parts: Sequence[torch.Tensor] = (loss, (weight * clipped).sum(), (weight * found).sum())
            sums.append(torch.stack([p.detach() for p in parts]))
            return loss * scale

        self._runner.run(self.trainable.ddp, micro, losses, forward_only=False)
        step = {f"critic/{name}": value for name, value in self.trainable.step().items()}
        return summed(sums, ("critic/vf_loss", "critic/vf_clipfrac", "critic/vpred_mean")) | step


def _value_rows(output: torch.Tensor, micro: MicroBatch, width: int) -> torch.Tensor:
    return micro.to_rows(context_whole(output[..., 0]), width)
