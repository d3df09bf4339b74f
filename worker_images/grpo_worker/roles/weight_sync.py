"""How a trainer rank gives its weights away: into its pod's memory, or over a link into the engines."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_worker.quantization.fp8 import Part
from grpo_worker.roles.dispatch import Dispatch, register
from grpo_worker.weightsync.trainer.endpoint import TrainerEndpoint

if TYPE_CHECKING:
    from grpo_worker.megatron.training.policy import PolicyModel

WEIGHTS = Path(os.environ.get("GRPO_WEIGHTS_DIR", "/weights"))


class WeightMethods:
    """Part of a trainer rank, which sets what stands here when it builds its model."""

    _rank: int
    _world: int
    _policy: "PolicyModel"
    _link: TrainerEndpoint

    @register(Dispatch.ONE_TO_ALL)
    def publish_weights(self, version: int, fp8: bool, deltas: bool) -> str:
        """Leave this rank's slices in the pod's shared memory; returns their digest.

        ``fp8``: in blocks of 128 x 128, as an FP8 checkpoint has them. ``deltas``: what changed as well.
        """
        from grpo_worker.quantization.fp8 import quantised_parts
        from grpo_worker.weightsync.trainer.publisher import publish

        with self._policy.trainable.weights.here():
            parts = self._owned()
            if fp8:
                parts = list(quantised_parts(parts))
            return publish(WEIGHTS, version, self._rank, self._world, parts, deltas).digest

    def _owned(self) -> list[Part]:
        return [(s.name, s.shape, s.dim, s.offset, s.tensor) for s in self._policy.shards()]

    @register(Dispatch.ONE_TO_ALL)
    def weight_layout(self, fp8: bool) -> str:
        """What this rank would send of a version: a manifest without bytes, as JSON."""
        with self._policy.trainable.weights.here():  # offloaded weights have no shape to be cut
            return self._link.layout(self._owned(), fp8)

    @register(Dispatch.RANK_ZERO)
    def listen(self, name: str) -> int:
        """Port of the store at which the members of the new link ``name`` meet."""
        return self._link.listen(name)

    @register(Dispatch.ONE_TO_ALL)
    def open_link(
        self, name: str, address: str, port: int, world: int, layouts: list[str], bucket: int, plan_id: str,
        backend: str,
    ) -> str:  # fmt: skip
        """Meet the engines; what went wrong, or an empty text."""
        return self._link.open(name, address, port, world, layouts, bucket, plan_id, backend)

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self, timeout: float, fp8: bool) -> str:
        """Send the current weights over the link; what went wrong, or an empty text."""
        with self._policy.trainable.weights.here():
            return self._link.send(self._owned(), timeout, fp8)

    @register(Dispatch.ONE_TO_ALL)
    def close_link(self) -> None:
        self._link.close()

    def give_up_link(self, name: str) -> None:
        """Make a call over the link ``name`` end soon; answered like ``position``."""
        self._link.give_up(name)
