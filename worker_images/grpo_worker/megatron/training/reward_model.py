"""Reward model: a frozen sequence classifier with one label, in the trainer's layout."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.data.micro_batch import MicroBatch
from grpo_worker.megatron.conversion import hf_mapping
from grpo_worker.megatron.conversion.readers import SafetensorsWeights
from grpo_worker.megatron.model.value_head import NAME, with_value_heads
from grpo_worker.megatron.optim.optimizer import frozen_weights
from grpo_worker.megatron.training.reductions import over_context
from grpo_worker.megatron.training.runner import Runner
from grpo_worker.megatron.training.setup import ModelSetup
from grpo_worker.model_files.config import model_config


class RewardModel:
    """Scores responses from the policy's token ids, so both models must share a vocabulary."""

    def __init__(self, path: str, setup: ModelSetup) -> None:
        """Load the model. ``path``: a Hugging Face directory with ``score.weight``; ``setup``: the policy's.

        Raises ValueError when the model has another vocabulary, no score head, or several labels.
        """
        hf, reader = model_config(path), SafetensorsWeights(Path(path))
        if hf["vocab_size"] != setup.hf["vocab_size"]:
            raise ValueError(
                f"spec.reward.model.path={path}: its vocabulary has {hf['vocab_size']} tokens, the policy's "
                f"{setup.hf['vocab_size']}: use a reward model with the policy's tokenizer"
            )
        try:
            head = reader.shape(NAME)
        except KeyError as error:
            raise ValueError(
                f"spec.reward.model.path={path}: there is no tensor {NAME}: use a sequence classifier"
            ) from error
        if head[0] != 1:
            raise ValueError(
                f"spec.reward.model.path={path}: the classifier has {head[0]} labels: use one with one label"
            )
        own = replace(setup, hf=hf | {"tie_word_embeddings": False}, reader=reader)
        chunks = with_value_heads(own.build())
        hf_mapping.load(chunks, own.family, reader)
        self._chunks = [chunk.eval().requires_grad_(False) for chunk in chunks]
        self._weights = frozen_weights(self._chunks, own.offload)
        self._runner = Runner(own.layout, own.batching)

    def scores(self, batch: RaggedBatch) -> dict[str, np.ndarray]:
        """Return scores [rows] fp32: the head's value at each row's last token.

        Returns an empty dict outside the last pipeline stage.
        """
        with self._weights.on_device():
            columns = self._runner.rows(self._chunks, batch, {"scores": _value_rows})
        # Of the context-parallel ranks one has the last token of a row, the others have 0.
        return {name: over_context(column[batch.starts[1:] - 1]) for name, column in columns.items()}


def _value_rows(output: torch.Tensor, micro: MicroBatch, width: int) -> torch.Tensor:
    """Return a value head's output at each token as [rows, width]."""
    return micro.own_rows(output[..., 0], width)
