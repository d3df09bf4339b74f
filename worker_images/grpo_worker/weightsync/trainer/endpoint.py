"""What a trainer rank knows of a link, from its layout to the last byte."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch._C._distributed_c10d import TCPStore

from grpo_worker.quantization.fp8 import Part, quantised_parts
from grpo_worker.weightsync.protocol.group_offer import transfer_plan_of
from grpo_worker.weightsync.protocol.manifest import layout
from grpo_worker.weightsync.trainer.sender import Sender
from grpo_worker.weightsync.transport.factory import join
from grpo_worker.weightsync.transport.rendezvous import TransferError, TransferGroup, connect, give_up

log = logging.getLogger(__name__)


@dataclass
class TrainerEndpoint:
    """Rank ``rank`` of ``world``. Failures are told by words: a broken link is no broken rank."""

    rank: int
    world: int
    device: torch.device
    _store: tuple[str, TCPStore] | None = None  # at the first rank: name and store of the latest link
    _members: TransferGroup | None = None
    _sender: Sender | None = field(default=None, repr=False)

    def layout(self, parts: Sequence[Part], fp8: bool) -> str:
        """Manifest without bytes of what this rank sends, as JSON."""
        shapes = [(*part[:-1], part[-1].to("meta")) for part in parts]
        return layout(self.rank, self.world, list(quantised_parts(shapes)) if fp8 else shapes).to_json()

    def listen(self, name: str) -> int:
        """Start the store of the new link ``name``, at the first rank; its port."""
        store = TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)
        self._store = name, store
        return int(store.port)

    def open(
        self, name: str, address: str, port: int, world: int, layouts: Sequence[str], bucket: int,
        plan_id: str, backend: str,
    ) -> str:  # fmt: skip
        """Join the link ``name`` of ``world`` members; what went wrong, or an empty text."""
        self.close()
        try:
            transfer_plan = transfer_plan_of(layouts, bucket, plan_id)
            store = self._store[1] if self.rank == 0 and self._store else connect(address, port)
            self._members = join(backend, store, name, self.rank, world, self.world, self.device)
            self._sender = Sender(self.rank, transfer_plan, self._members, self.device)
        except (TransferError, ValueError) as error:
            return f"trainer rank {self.rank}: {error}"
        return ""

    def send(self, parts: Sequence[Part], timeout: float, fp8: bool) -> str:
        """One version to all engines of the link; what went wrong, or an empty text."""
        if self._sender is None:
            return f"trainer rank {self.rank}: it is in no link"
        try:
            self._sender.send(parts, timeout, fp8)
        except TransferError as error:
            return f"trainer rank {self.rank}: {error}"
        return ""

    def give_up(self, name: str) -> None:
        """Make the members of the link ``name`` give up, also while it forms. Told to the first rank, from
        any thread; an older link's name changes nothing."""
        if self._store is not None and self._store[0] == name:
            give_up(self._store[1], name)

    def close(self) -> None:
        """Leave the link, if there is one."""
        members, self._members, self._sender = self._members, None, None
        if members is not None:
            try:
                members.close()
            except RuntimeError as error:
                log.info("leaving a link: %s", error)
