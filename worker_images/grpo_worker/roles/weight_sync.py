"""Methods of a trainer rank that hand its weights on: staged in host memory, or sent directly to engines."""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_worker.profiling.progress import PROGRESS
from grpo_worker.quantization.fp8 import Part
from grpo_worker.roles.dispatch import Dispatch, register
from grpo_worker.weightsync.protocol.link_offer import LinkOffer
from grpo_worker.weightsync.protocol.version import Version
from grpo_worker.weightsync.transport.rendezvous import JOIN_SECONDS

if TYPE_CHECKING:
    from grpo_worker.roles.trainer_models import TrainerModels
    from grpo_worker.weightsync.trainer.version_copy import VersionCopy

_GIVING_UP_SECONDS = 10.0  # that a rank has for it after its patience, before it counts as hanging
WEIGHTS = Path(os.environ.get("GRPO_WEIGHTS_DIR", "/weights"))


class WeightMethods:
    """Mixin of the trainer rank, which sets these attributes when it builds its models.

    Methods that take part in a direct transfer return errors as text: a failed transfer must not fail the
    rank.
    """

    _rank: int
    _world: int
    _models: "TrainerModels"
    _version_copy: "VersionCopy | None"

    @register(Dispatch.ONE_TO_ALL)
    def publish_weights(self, version: Version, fp8: bool, deltas: bool) -> str:
        """Write this rank's slices to the pod's shared memory; return their digest.

        ``fp8``: quantise in blocks of 128 x 128, as in FP8 checkpoints. ``deltas``: also write the changes
        since the previous version.
        """
        from grpo_worker.quantization.fp8 import quantised_parts
        from grpo_worker.weightsync.trainer.publisher import publish

        if self._version_copy is not None:
            self._version_copy.before_publishing(version)
        with self._models.policy.trainable.weights.on_device():
            parts = self._owned()
            if fp8:
                parts = list(_counted(quantised_parts(parts)))
            return publish(WEIGHTS, version, self._rank, self._world, parts, deltas).digest

    def _owned(self) -> list[Part]:
        return [(s.name, s.shape, s.dim, s.offset, s.tensor) for s in self._models.policy.shards()]

    def _held(self) -> list[Part]:
        return [(s.name, s.shape, s.dim, s.offset, s.tensor) for s in self._models.policy.held_shards()]

    @register(Dispatch.ONE_TO_ALL)
    def exchange_layouts(self, fp8: bool) -> str:
        """Tell the first rank what this rank holds, once for each ``fp8``.

        Returns the error, or an empty text.
        """
        links = self._models.links
        if links.knows_layouts(fp8):
            return ""
        try:
            with self._models.policy.trainable.weights.on_device():  # offloaded weights have no shape
                links.exchange_layouts(self._held(), fp8)
        except ValueError as error:
            return f"trainer rank {self._rank}: {error}"
        return ""

    @register(Dispatch.RANK_ZERO)
    def start_rendezvous(self, names: Sequence[str], fp8: bool) -> int:
        """Prepare the store for the links ``names``; return its port."""
        return self._models.links.listen(names, fp8)

    @register(Dispatch.ONE_TO_ALL)
    def open_links(self, offers: Sequence[LinkOffer]) -> list[str]:
        """Join the offered links one after another; return the error of each, or an empty text."""
        problems, links = [], self._models.links
        for number, offer in enumerate(offers, 1):
            later = [other.name for other in offers[number:]]
            with PROGRESS.waiting(JOIN_SECONDS), links.beating(later):  # for the next sign of a member
                problems.append(links.open(offer))
            PROGRESS.add("links opened")
        return problems

    @register(Dispatch.ONE_TO_ALL)
    def send_weights(self, names: Sequence[str], patience: float) -> list[str]:
        """Send the current weights over the links; return the error of each, or an empty text.

        ``patience``: seconds that the rank waits for a wave.
        """
        # Waves are progress. A rank that waits for an engine gives up first; one that hangs is named.
        with self._models.policy.trainable.weights.on_device(), PROGRESS.waiting(_GIVING_UP_SECONDS):
            return self._models.links.send(names, self._held(), patience)

    @register(Dispatch.ONE_TO_ALL)
    def close_links(self, names: Sequence[str]) -> None:
        """Leave the links ``names``, if there are such."""
        self._models.links.close(names)

    def give_up_transfer(self, name: str) -> None:
        """Make all members end their waits in the link ``name``.

        The controller calls it in the thread that answers while another call runs, like ``position``.
        """
        self._models.links.give_up(name)


def _counted(parts: Iterable[Part]) -> Iterator[Part]:
    for part in parts:
        PROGRESS.add("tensors quantized")
        yield part
