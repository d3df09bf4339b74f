"""PPO's critic on one rank: values of tokens, and optimizer steps."""

from dataclasses import replace

import numpy as np
import torch

from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.algorithms.losses import value_loss
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.data.micro_batch import MicroBatch
from grpo_worker.megatron.conversion import hf_mapping
from grpo_worker.megatron.conversion.readers import WeightReader
from grpo_worker.megatron.model.value_head import NAME, with_value_heads
from grpo_worker.megatron.optim.optimizer import Trainable
from grpo_worker.megatron.training.runner import Runner
from grpo_worker.megatron.training.setup import ModelSetup


class ValueHeadWeights:
    """Reader of initial weights that adds a value head where the checkpoint has none.

    The added head is zero, so that an untrained critic expects a return of 0.
    """

    def __init__(self, reader: WeightReader, hidden: int) -> None:
        self._reader = reader
        self._hidden = hidden

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a whole tensor. Raises KeyError for an unknown name."""
        try:
            return self._reader.shape(name)
        except KeyError:
            if name != NAME:
                raise
            return (1, self._hidden)

    def read(self, name: str, dim: int, offset: int, length: int) -> torch.Tensor:
        """Read ``length`` entries of a tensor from ``offset`` along ``dim``."""
        try:
            return self._reader.read(name, dim, offset, length)
        except KeyError:
            if name != NAME:
                raise
            return torch.zeros(1, self._hidden).narrow(dim, offset, length)


class CriticModel:
    """Model of the policy's architecture with a value head, in the policy's layout."""

    def __init__(self, setup: ModelSetup, optimizer: OptimizerSpec, updates: int) -> None:
        self.layout = setup.layout
        untied = replace(setup, hf=setup.hf | {"tie_word_embeddings": False})
        chunks = with_value_heads(untied.build_trained())
        hf_mapping.load(chunks, setup.family, ValueHeadWeights(setup.reader, setup.hf["hidden_size"]))
        self.trainable = Trainable(chunks, optimizer, updates, setup.offload, setup.optimizer_dtypes)
        self._runner = Runner(setup.layout, setup.batching)

    def values(self, batch: RaggedBatch) -> dict[str, np.ndarray]:
        """Return the expected return before each token.

        Returns values [tokens] fp32, 0 at the first token of each row and where another context-parallel
        rank has them; an empty dict outside the last pipeline stage.
        """
        for chunk in self.trainable.chunks:
            chunk.eval()
        with self.trainable.weights.on_device():
            return self._runner.rows(self.trainable.chunks, batch, {"values": _value_rows})

    def update(self, batch: RaggedBatch, cliprange: float) -> dict[str, float]:
        """Take one optimizer step on this data-parallel rank's share of a mini-batch.

        batch: response columns values (before the first update) and returns, and the row column weights (of
        the *global* mini-batch). Returns metrics of the global mini-batch.
        """

        def losses(output: torch.Tensor, part: MicroBatch, width: int) -> tuple[torch.Tensor, torch.Tensor]:
            rows, values = part.columns, part.loss_rows(output[..., 0], width)
            tokens, clipped = value_loss(values, rows["values"], rows["returns"], cliprange)
            weight = rows["weights"]
            loss = (weight * tokens).sum()
            figures = (loss, (weight * clipped).sum(), (weight * values).sum())
            return loss, torch.stack([figure.detach() for figure in figures])

        names = ("vf_loss", "vf_clipfrac", "vpred_mean")
        figures = self._runner.update(self.trainable, batch, losses, names)
        return {f"critic/{name}": value for name, value in figures.items()}


def _value_rows(output: torch.Tensor, micro: MicroBatch, width: int) -> torch.Tensor:
    """Return a value head's output before each token as [rows, width]."""
    return micro.to_rows(output[..., 0], width)
