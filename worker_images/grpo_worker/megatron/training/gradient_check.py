"""Check for silent data corruption: gradients that are computed twice must have the same bits.

Megatron-Core finds gradients that are no numbers. A finite wrong one looks like any other, but a sound GPU
that adds in a fixed order computes it again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from grpo_worker.common.rank_errors import GradientMismatchError
from grpo_worker.megatron.model.build import device
from grpo_worker.megatron.optim.optimizer import Trainable
from grpo_worker.megatron.training.expert_load import ExpertLoad

_BITS = {2: torch.int16, 4: torch.int32}  # bytes of a value -> integers of that size


class GradientCheck:
    """Compares two computations of the gradients of one mini-batch, before they are used."""

    def __init__(self, trainable: Trainable, load: ExpertLoad) -> None:
        self._trainable, self._load = trainable, load
        self._first: list[torch.Tensor] = []

    @contextmanager
    def first_passes(self) -> Iterator[None]:
        """Note the gradients that the passes inside compute, and undo everything else that they change."""
        kept = [(buffer, buffer.clone()) for chunk in self._trainable.chunks for buffer in chunk.buffers()]
        with self._load.paused():
            yield
        self._first = self._sums()
        for buffer, before in kept:  # such as the bias of experts
            buffer.copy_(before)
        self._trainable.zero_gradients()

    def compare(self) -> None:
        """Compare the gradients with those of the first passes. Collective.

        Raises GradientMismatchError on the ranks that computed different ones. A rank whose gradients differ
        because it received those of another one does not raise.
        """
        own, received = 0, 0
        buckets = self._trainable.gradient_buckets()
        for bucket, first, second in zip(buckets, self._first, self._sums(), strict=True):
            differs = (first != second).tolist()
            received += differs.pop(bucket.own)
            own += sum(differs)
        found = torch.tensor([own, received], device=device())
        everyone = found.new_empty(2 * dist.get_world_size())
        dist.all_gather_into_tensor(everyone, found)
        ranks = _culprits(everyone.view(-1, 2))
        if dist.get_rank() in ranks:
            raise GradientMismatchError(
                f"trainer ranks {ranks} computed the gradients of the same samples twice, with different "
                "bits: look for faults of their GPUs, and cordon the nodes if it happens again"
            )

    def _sums(self) -> list[torch.Tensor]:
        """Return for each bucket the sums [data-parallel ranks] of the bits of each rank's shard, int64.

        A rank's own shard is the sum over all ranks; the others are what this rank itself computed.
        """
        sums = []
        for bucket in self._trainable.gradient_buckets():
            bits = bucket.values.view(_BITS[bucket.values.element_size()])
            sums.append(bits.view(bucket.ranks, -1).sum(dim=1, dtype=torch.int64))
        return sums


def _culprits(differences: torch.Tensor) -> list[int]:
    """Return the ranks whose own gradients differ, or else those of which only the reduced ones do.

    differences: [ranks, 2] of a rank's own and of its reduced gradients.
    """
    own, received = (differences[:, column].nonzero().flatten().tolist() for column in (0, 1))
    return own or received
