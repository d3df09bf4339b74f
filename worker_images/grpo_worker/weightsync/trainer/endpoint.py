"""Endpoint of a trainer rank: joins transfer groups and sends versions to their engines."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from grpo_worker.quantization.fp8 import Part, quantised_parts
from grpo_worker.weightsync.protocol.group_offer import (
    GroupOffer,
    PlannedTransfer,
    check_plan,
    transfer_plan_of,
)
from grpo_worker.weightsync.protocol.manifest import layout
from grpo_worker.weightsync.protocol.packed_layouts import join as join_layouts
from grpo_worker.weightsync.protocol.packed_layouts import pack, unpack
from grpo_worker.weightsync.protocol.tiling import PlanError
from grpo_worker.weightsync.protocol.transfer_plan import TransferPlan
from grpo_worker.weightsync.trainer.layout_server import LayoutServer
from grpo_worker.weightsync.trainer.sender import Sender
from grpo_worker.weightsync.transport.factory import join
from grpo_worker.weightsync.transport.rendezvous import TransferError, TransferGroup, connect, give_up

log = logging.getLogger(__name__)
Gather = Callable[[bytes], Sequence[bytes]]  # bytes of this rank -> those of every rank; collective


def gather_in_gang(own: bytes) -> list[bytes]:
    """Return the bytes of every rank of the gang, in the order of the ranks. Collective."""
    gathered = [b""] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


@dataclass
class TrainerEndpoint:
    """Endpoint of trainer rank ``rank`` of ``world``; it is in at most one transfer group.

    The ranks exchange their layouts among themselves by ``gather`` and plan alike. ``plan``, ``open`` and
    ``send`` return errors as text: a failed transfer must not fail the rank.
    """

    rank: int
    world: int
    device: torch.device
    gather: Gather = gather_in_gang
    _layouts: dict[bool, Sequence[bytes]] = field(default_factory=dict)  # of all ranks, by the flag fp8
    _offered: Sequence[bytes] = ()  # layouts of the newest plan
    _plan: TransferPlan | None = field(default=None, repr=False)  # until a group is opened with it
    _store: tuple[str, TCPStore] | None = None  # on rank 0: name and store of the newest group
    _layout_server: LayoutServer | None = None  # on rank 0, of the newest group
    _group: TransferGroup | None = None
    _sender: Sender | None = field(default=None, repr=False)

    def layout(self, parts: Sequence[Part], fp8: bool) -> str:
        """Return the layout of this rank's versions: a manifest without a blob, as JSON."""
        shapes = [(*part[:-1], part[-1].to("meta")) for part in parts]
        return layout(self.rank, self.world, list(quantised_parts(shapes)) if fp8 else shapes).to_json()

    def knows_layouts(self, fp8: bool) -> bool:
        """Return whether the ranks have exchanged their layouts, which stay the same as long as the gang."""
        return fp8 in self._layouts

    def exchange_layouts(self, parts: Sequence[Part], fp8: bool) -> None:
        """Tell all ranks this rank's layout, and learn theirs. Collective."""
        self._layouts[fp8] = self.gather(pack(self.layout(parts, fp8)))

    def plan(self, bucket_bytes: int, fp8: bool) -> PlannedTransfer:
        """Plan the transfers of the next group, after ``exchange_layouts``."""
        self._offered = self._layouts[fp8]
        try:
            self._plan = transfer_plan_of(unpack(self._offered), bucket_bytes)
        except PlanError as error:
            self._plan = None
            return PlannedTransfer("", f"trainer rank {self.rank}: {error}")
        return PlannedTransfer(self._plan.plan_id)

    def listen(self, name: str) -> tuple[int, int]:
        """Start the rendezvous of the new group ``name`` on rank 0.

        Returns the port of its store, and the port at which agents read the layouts of the newest plan.
        """
        store = TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)
        self._store = name, store
        if self._layout_server is not None:
            self._layout_server.close()
        self._layout_server = LayoutServer(name, join_layouts(self._offered))
        return int(store.port), self._layout_server.port

    def open(self, offer: GroupOffer) -> str:
        """Leave the old group and join the offered one; return the error, or an empty text.

        It uses up the plan, which takes much memory.
        """
        self.close()
        transfer_plan, self._plan = self._plan, None
        try:
            if transfer_plan is None:
                raise PlanError("it has planned no transfers")
            check_plan(transfer_plan, offer)
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
