"""The value head of a checkpoint, or zeros."""

import torch

from grpo_worker.megatron.conversion.readers import WeightReader
from grpo_worker.megatron.model.value_head import NAME


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
