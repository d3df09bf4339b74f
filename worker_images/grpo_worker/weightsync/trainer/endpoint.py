"""Endpoint of a trainer rank: joins transfer groups and sends versions to their engines."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch._C._distributed_c10d import TCPStore

from grpo_worker.quantization.fp8 import Part, quantised_parts
from grpo_worker.weightsync.protocol.group_offer import GroupOffer, transfer_plan_of
from grpo_worker.weightsync.protocol.manifest import layout
from grpo_worker.weightsync.trainer.sender import Sender
from grpo_worker.weightsync.transport.factory import join
from grpo_worker.weightsync.transport.rendezvous import TransferError, TransferGroup, connect, give_up

log = logging.getLogger(__name__)


@dataclass
class TrainerEndpoint:
    """Endpoint of trainer rank ``rank`` of ``world``; it is in at most one transfer group.

    ``open`` and ``send`` return errors as text: a failed transfer must not fail the rank.
    """

    rank: int
    world: int
    device: torch.device
    _store: tuple[str, TCPStore] | None = None  # on rank 0: name and store of the newest group
    _group: TransferGroup | None = None
    _sender: Sender | None = field(default=None, repr=False)

    def layout(self, parts: Sequence[Part], fp8: bool) -> str:
        """Return the layout of this rank's versions: a manifest without a blob, as JSON."""
        shapes = [(*part[:-1], part[-1].to("meta")) for part in parts]
        return layout(self.rank, self.world, list(quantised_parts(shapes)) if fp8 else shapes).to_json()

    def listen(self, name: str) -> int:
        """Start the rendezvous store of the new group ``name`` on rank 0, and return its port."""
        store = TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)
        self._store = name, store
        return int(store.port)

    def open(self, offer: GroupOffer) -> str:
        """Leave the old group and join the offered one; return the error, or an empty text."""
        self.close()
        try:
            transfer_plan = transfer_plan_of(offer.layouts, offer.bucket_bytes, offer.plan_id)
            local = self._store[1] if self.rank == 0 and self._store else None
            store = local or connect(offer.address, offer.port)
            group = offer.name, self.rank, offer.world, self.world, self.device
            self._group = join(offer.backend, store, *group)
            self._sender = Sender(self.rank, transfer_plan, self._group, self.device)
        except (TransferError, ValueError) as error:
            return f"trainer rank {self.rank}: {error}"
        return ""

    def send(self, parts: Sequence[Part], timeout: float, fp8: bool) -> str:
        """Send one version to all engines of the group; return the error, or an empty text."""
        if self._sender is None:
            return f"trainer rank {self.rank}: it is in no transfer group"
        try:
            self._sender.send(parts, timeout, fp8)
        except TransferError as error:
            return f"trainer rank {self.rank}: {error}"
        return ""

    def give_up(self, name: str) -> None:
        """Make all members of the group ``name`` give up, also while it forms. Thread-safe.

        Rank 0 alone can do this. The name of an older group has no effect.
        """
        if self._store is not None and self._store[0] == name:
            give_up(self._store[1], name)

    def close(self) -> None:
        """Leave the group, if there is one."""
        group, self._group, self._sender = self._group, None, None
        if group is not None:
            try:
                group.close()
            except RuntimeError as error:
                log.info("leaving a transfer group: %s", error)
