"""Methods of a trainer rank that hand its weights on: staged in host memory, or sent directly to engines."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_worker.profiling.progress import PROGRESS
from grpo_worker.quantization.fp8 import Part
from grpo_worker.roles.dispatch import Dispatch, register
from grpo_worker.weightsync.protocol.group_offer import GroupOffer, PlannedTransfer
from grpo_worker.weightsync.protocol.version import Version
from grpo_worker.weightsync.transport.rendezvous import JOIN_SECONDS

if TYPE_CHECKING:
    from grpo_worker.roles.trainer_models import TrainerModels

WEIGHTS = Path(os.environ.get("GRPO_WEIGHTS_DIR", "/weights"))


class WeightMethods:
    """Mixin of the trainer rank, which sets these attributes when it builds its models.

    Methods that take part in a direct transfer return errors as text: a failed transfer must not fail the
    rank.
    """

    _rank: int
    _world: int
    _models: "TrainerModels"

    @register(Dispatch.ONE_TO_ALL)
    def publish_weights(self, version: Version, fp8: bool, deltas: bool) -> str:
        """Write this rank's slices to the pod's shared memory; return their digest.

        ``fp8``: quantise in blocks of 128 x 128, as in FP8 checkpoints. ``deltas``: also write the changes
        since the previous version.
        """
        from grpo_worker.quantization.fp8 import quantised_parts
        from grpo_worker.weightsync.trainer.publisher import publish

        with self._models.policy.trainable.weights.on_device():
            parts = self._owned()
            if fp8:
                parts = list(_counted(quantised_parts(parts)))
            return publish(WEIGHTS, version, self._rank, self._world, parts, deltas).digest

    def _owned(self) -> list[Part]:
        return [(s.name, s.shape, s.dim, s.offset, s.tensor) for s in self._models.policy.shards()]

    @register(Dispatch.ONE_TO_ALL)
    def plan_transfer(self, bucket_bytes: int, fp8: bool) -> PlannedTransfer:
        """Plan the transfers of the next group; the first time the ranks exchange their layouts for it."""
        endpoint = self._models.endpoint
        if not endpoint.knows_layouts(fp8):
            with self._models.policy.trainable.weights.on_device():  # offloaded weights have no shape
                endpoint.exchange_layouts(self._owned(), fp8)
        return endpoint.plan(bucket_bytes, fp8)

    @register(Dispatch.RANK_ZERO)
    def start_rendezvous(self, name: str) -> tuple[int, int]:
        """Start the rendezvous of the new transfer group ``name``; return its ports, see ``listen``."""
        return self._models.endpoint.listen(name)

    @register(Dispatch.ONE_TO_ALL)
    def open_transfer_group(self, offer: GroupOffer) -> str:
        """Join the offered transfer group; return the error, or an empty text."""
        with PROGRESS.waiting(2 * JOIN_SECONDS):  # until the group is assembled, and until it is connected
            return self._models.endpoint.open(offer)

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self, timeout: float, fp8: bool) -> str:
        """Send the current weights to the engines of the group; return the error, or an empty text."""
        with self._models.policy.trainable.weights.on_device(), PROGRESS.waiting(timeout):
            return self._models.endpoint.send(self._owned(), timeout, fp8)

    @register(Dispatch.ONE_TO_ALL)
    def close_transfer_group(self) -> None:
        """Leave the transfer group, if there is one."""
        self._models.endpoint.close()

    def give_up_transfer(self, name: str) -> None:
        """Make all members end their waits in the transfer group ``name``.

        The controller calls it in the thread that answers while another call runs, like ``position``.
        """
        self._models.endpoint.give_up(name)


def _counted(parts: Iterable[Part]) -> Iterator[Part]:
    for part in parts:
        PROGRESS.add("tensors quantized")
        yield part
