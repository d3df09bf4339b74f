"""Sequences that a model learns within a few hundred steps, and batches of them (numpy only)."""

import numpy as np
import torch

from grpo_worker.algorithms.losses import row_weights
from grpo_worker.common.ragged_batch import RaggedBatch

SEED = 7  # of the chain that all cases use
CHANCES = np.array([0.5, 0.25, 0.15, 0.1])  # of the tokens that may come next


class Chain:
    """A random process: four tokens may follow, by the last token and the parity of the one before it.

    A model needs its attention for the parity and its matrices for the rest.
    """

    def __init__(self, vocabulary: int, seed: int = SEED) -> None:
        self._vocabulary = vocabulary
        shape = 2, vocabulary, len(CHANCES)
        self._following = np.random.default_rng(seed).integers(vocabulary, size=shape, dtype=np.int32)

    @property
    def entropy(self) -> float:
        """Nats of a token given those before it: no model can have a smaller loss."""
        return float(-(CHANCES * np.log(CHANCES)).sum())

    def sequences(self, count: int, length: int, seed: int) -> np.ndarray:
        """Draw sequences, int32 [count, length]. The first two tokens of each are uniformly random."""
        generator = np.random.default_rng(seed)
        tokens = generator.integers(self._vocabulary, size=(count, length), dtype=np.int32)
        choices = generator.choice(len(CHANCES), size=(count, length), p=CHANCES)
        for place in range(2, length):
            parity = tokens[:, place - 2] % 2
            tokens[:, place] = self._following[parity, tokens[:, place - 1], choices[:, place]]
        return tokens


def batch_of(tokens: np.ndarray, prompt: int) -> RaggedBatch:
    """Return rows [rows, tokens] as a batch whose response tokens all have advantage 1 and equal weight.

    The gradient of the policy loss is then that of the mean negative log-probability. ``prompt``: tokens
    of each row that are not of the response.
    """
    rows, length = tokens.shape
    lengths = np.full(rows, length, np.int32)
    answers = torch.full((rows,), length - prompt)
    return RaggedBatch(
        np.full(rows, prompt, np.int32), lengths, length, tokens.astype(np.int32).reshape(-1), {},
        {
            "advantages": np.ones(rows, np.float32),
            "weights": row_weights(answers, "token-mean", length).numpy(),
        },
    )  # fmt: skip
