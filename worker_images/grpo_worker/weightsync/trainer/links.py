"""Links of a trainer rank: to each engine a transfer group and a part of that engine's plan."""

import hashlib
import json
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from grpo_worker.common.garbage import collector_paused
from grpo_worker.quantization.fp8 import Part, quantised_parts
from grpo_worker.weightsync.planner.boxes import Kept, held_regions
from grpo_worker.weightsync.planner.engine_plan import EnginePlan, plan_engine
from grpo_worker.weightsync.planner.regions import Held, Tensor
from grpo_worker.weightsync.protocol.link_exchange import LinkExchange, TensorRow, beating
from grpo_worker.weightsync.protocol.link_offer import LinkOffer
from grpo_worker.weightsync.protocol.manifest import Slice, slices_of
from grpo_worker.weightsync.trainer.wave_packer import Shards
from grpo_worker.weightsync.trainer.wave_sender import WaveSender
from grpo_worker.weightsync.transport.factory import join
from grpo_worker.weightsync.transport.rendezvous import TransferError, TransferGroup, connect, give_up

log = logging.getLogger(__name__)
Gather = Callable[[bytes], Sequence[bytes]]  # bytes of this rank -> on rank 0 those of every rank; collective


def gather_in_gang(own: bytes) -> list[bytes]:
    """Return on rank 0 the bytes of every rank of the gang, in the order of the ranks. Collective."""
    gathered: list[bytes] | None = [b""] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, gathered)
    return gathered or []


@dataclass(frozen=True, slots=True)
class _Weights:
    """Weights of the gang: tensors as engines load them, and the regions that ranks hold."""

    rows: list[TensorRow]
    tensors: dict[str, Tensor]
    held: list[Held]


@dataclass(frozen=True, slots=True)
class _Planned:
    """Plan for engines of one kind. ``sent``: bytes that each trainer rank sends to one of them."""

    plan: EnginePlan
    sent: Counter[int]


@dataclass(frozen=True, slots=True)
class _Link:
    group: TransferGroup
    sender: WaveSender
    sent: Counter[int]  # bytes that each trainer rank sends over it; known to rank 0


@dataclass
class TrainerLinks:
    """Links of trainer rank ``rank`` of ``world``.

    ``open`` and ``send`` return errors as text: a failed transfer must not fail the rank. Rank 0 plans.
    """

    rank: int
    world: int
    device: torch.device
    gather: Gather = gather_in_gang
    _exchanged: set[bool] = field(default_factory=set)  # flags fp8
    _weights: dict[bool, _Weights] = field(default_factory=dict, repr=False)  # on rank 0, by the flag fp8
    _plans: dict[str, _Planned] = field(default_factory=dict, repr=False)  # on rank 0, by kind of engine
    _store: TCPStore | None = None  # on rank 0
    _links: dict[str, _Link] = field(default_factory=dict, repr=False)

    def knows_layouts(self, fp8: bool) -> bool:
        """Return whether rank 0 knows what ranks hold, which stays the same as long as the gang."""
        return fp8 in self._exchanged

    def exchange_layouts(self, parts: Sequence[Part], fp8: bool) -> None:
        """Tell rank 0 what this rank holds, copies included. Collective. Raises RegionError on rank 0."""
        shapes = [(*part[:-1], part[-1].to("meta")) for part in parts]
        own = slices_of(list(quantised_parts(shapes)) if fp8 else shapes)
        rows = [[s.name, s.shape, s.dtype, s.dim, s.offset, s.length] for s in own]
        gathered = self.gather(zlib.compress(json.dumps(rows).encode()))
        self._exchanged.add(fp8)
        if self.rank == 0:
            layouts = [[_slice(row) for row in json.loads(zlib.decompress(each))] for each in gathered]
            named = {part.name: part for layout in layouts for part in layout}
            tensors, held = held_regions(layouts)
            table = [TensorRow(part.name, part.shape, part.dtype) for _, part in sorted(named.items())]
            self._weights[fp8] = _Weights(table, tensors, held)

    def listen(self, names: Sequence[str], fp8: bool) -> int:
        """Leave the tensors for the engines of the links ``names`` at rank 0's store; return its port."""
        if self._store is None:
            self._store = TCPStore("0.0.0.0", 0, None, True, wait_for_workers=False)
        for name in names:
            LinkExchange(PrefixStore(name, self._store)).put_tensors(self._weights[fp8].rows)
        return int(self._store.port)

    def beating(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Let rank 0 beat for the links ``names`` during a block: their engines wait until it opens them."""
        if self._store is None:
            return nullcontext()
        return beating([LinkExchange(PrefixStore(name, self._store)) for name in names])

    def open(self, offer: LinkOffer) -> str:
        """Join the offered link; return the error, or an empty text."""
        try:
            store = self._store or connect(offer.address, offer.port)
            place = offer.name, self.rank, offer.world, offer.trainers, self.device
            group = join(offer.backend, store, *place)
            exchange = LinkExchange(PrefixStore(offer.name, store))
            sent = self._plan(offer, exchange, group) if self.rank == 0 else Counter[int]()
            try:
                part = exchange.sends(self.rank, group.wait_for)
                group.connect([offer.trainers + landing for landing in part.landings], [])
            except (TransferError, ValueError):
                group.close()
                raise
            sender = WaveSender(part, group, offer.trainers, self.device)
            self._links[offer.name] = _Link(group, sender, sent)
        except (TransferError, ValueError, RuntimeError) as error:
            return f"trainer rank {self.rank}: {str(error)[:200]}"
        return ""

    def _plan(self, offer: LinkOffer, exchange: LinkExchange, group: TransferGroup) -> Counter[int]:
        """Plan the transfers to an engine and leave each member its part; return the bytes of each sender."""
        group.wait_for(
            lambda: exchange.all_keep(offer.ranks),
            lambda: "the engine's ranks did not tell what they keep",
        )
        try:
            with beating([exchange]):
                planned = self._planned(offer, exchange.kept(offer.ranks))
        except ValueError as error:
            exchange.refuse(str(error))
            return Counter()
        exchange.put_parts(planned.plan, offer.trainers, offer.ranks)
        return planned.sent

    def _planned(self, offer: LinkOffer, kept: Mapping[int, Kept]) -> "_Planned":
        """Return the plan for an engine. Engines of one kind share it: it loads all senders evenly."""
        fields = offer.hosts, offer.backend, offer.bucket_bytes, offer.links, offer.fp8
        content = hashlib.sha256(repr((fields, sorted(kept.items()))).encode()).hexdigest()
        if content not in self._plans:
            busy: Counter[int] = sum((link.sent for link in self._links.values()), Counter())
            weights = self._weights[offer.fp8]
            limits = offer.bucket_bytes, offer.links
            plan = plan_engine(weights.tensors, weights.held, kept, offer.host_of, *limits, busy)
            own = Counter({rank: nbytes - busy[rank] for rank, nbytes in plan.sent.items()})
            self._plans[content] = _Planned(plan, own)
        return self._plans[content]

    def send(self, names: Sequence[str], parts: Sequence[Part], patience: float) -> list[str]:
        """Send one version over the links ``names`` at the same time; return the error of each, or "".

        ``patience``: seconds that the rank waits for a wave.
        """
        shards = Shards(parts)

        def send(name: str) -> str:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            if name not in self._links:
                return f"trainer rank {self.rank}: it has no link {name}"
            try:
                self._links[name].sender.send(shards, patience)
            except TransferError as error:
                return f"trainer rank {self.rank}: {error}"
            return ""

        with collector_paused(), ThreadPoolExecutor(max(len(names), 1)) as threads:
            return list(threads.map(send, names))

    def give_up(self, name: str) -> None:
        """Make all members of the link ``name`` give up, also while it forms. Thread-safe; rank 0 alone."""
        if self._store is not None:
            give_up(self._store, name)

    def close(self, names: Sequence[str]) -> None:
        """Leave the links ``names``, if there are such."""
        for name in names:
            link = self._links.pop(name, None)
            if link is None:
                continue
            try:
                link.group.close()
            except RuntimeError as error:
                log.info("leaving %s: %s", name, error)


def _slice(row: Sequence[Any]) -> Slice:
    name, shape, dtype, dim, offset, length = row
    return Slice(name, tuple(shape), dtype, dim, offset, length, 0, 0)
