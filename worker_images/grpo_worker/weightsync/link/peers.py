"""The process group of a link: all trainer ranks, then all engine ranks."""

import socket
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, _abort_process_group

from grpo_worker.weightsync import membership

JOIN_SECONDS = 60.0
_FOREVER = timedelta(days=1)  # NCCL's own watchdog would end the process; deadlines are kept here
# gloo waits five times as long for a connection as for anything else, and nothing can interrupt it.
_GLOO = timedelta(seconds=8)
_POLL, _ASK = 0.0001, 0.5  # seconds between two looks at a transfer, and at whether others gave up
_LOOK = 0.05  # seconds between two looks at whether all have come: hundreds look
_GIVEN_UP = "given-up"


class LinkError(RuntimeError):
    """A member of the link is missing, or did not send or take its bytes in time."""


class Transfer:
    """Bytes under way. Their tensors are kept until then. ``given_up``: has a member given up?"""

    def __init__(
        self, works: Iterable[Any], tensors: Sequence[torch.Tensor], deadline: float,
        given_up: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._works = list(works)
        self._tensors = tensors
        self._deadline = deadline
        self._given_up = given_up

    def wait(self) -> None:
        """Until the bytes are there, or have left. Raises LinkError at the deadline, or for a lost peer."""
        try:
            for work in self._works:
                self._wait(work)
        except RuntimeError as error:  # gloo's words for a peer that is gone, and NCCL's
            raise LinkError(str(error).splitlines()[0][:200]) from error

    def _wait(self, work: Any) -> None:
        left = self._deadline - time.monotonic()
        if not self._tensors[0].is_cuda:
            work.wait(timedelta(seconds=max(left, 0.001)))
            return
        # Only what is looked at can be given up: a stream that waits for a dead peer waits for ever.
        asked = time.monotonic()
        while not work.is_completed():
            now = time.monotonic()
            if now > self._deadline:
                raise LinkError("not done within the deadline")
            if now > asked + _ASK:
                asked = now
                if self._given_up():
                    raise LinkError("another member gave up")
            time.sleep(_POLL)
        work.wait()


class Peers:
    """This process in the group ``name`` of ``world`` members, the first ``trainers`` of which send."""

    def __init__(
        self, store: Any, name: str, rank: int, world: int, trainers: int, device: torch.device
    ) -> None:
        """Returns when all are there. Raises LinkError."""
        self._device = device
        self._store = PrefixStore(name, store)
        self._rank = rank
        self.engines = range(trainers, world)
        cuda = device.type == "cuda"
        limit = _FOREVER if cuda else _GLOO
        try:
            self._assemble(rank, world)
            self.group = membership.join(self._store, name, rank, world, limit, "nccl" if cuda else "gloo")
            # Later transfers are between pairs: NCCL must have met all before. By a broadcast, which has
            # one algorithm: engines that sample reproducibly force another one of all-reduce than trainers
            # have, and would wait for ever.
            met = dist.broadcast(torch.ones(1, device=device), src=0, group=self.group, async_op=True)
            here = [torch.empty(0, device=device)]
            Transfer([met], here, time.monotonic() + JOIN_SECONDS, self._given_up).wait()
        except RuntimeError as error:
            raise LinkError(f"the group {name} did not form: {str(error)[:200]}") from error

    def _assemble(self, rank: int, world: int) -> None:
        """Until every member has come: only from here on do they wait for each other in a way that cannot be
        given up. Raises LinkError."""
        deadline = time.monotonic() + JOIN_SECONDS
        self._store.set(f"here-{rank}", "")
        if self._store.add("here", 1) == world:
            self._store.set("complete", "")
        while not self._store.check(["complete"]):
            if self._given_up():
                raise LinkError("another member gave up")
            if time.monotonic() > deadline:
                missing = [member for member in range(world) if not self._store.check([f"here-{member}"])]
                raise LinkError(f"ranks {missing} did not come in {JOIN_SECONDS:.0f} s")
            time.sleep(_LOOK)

    def tell(self, trainer: int, text: str) -> None:
        """Leave a word of this rank for a trainer rank. Raises LinkError."""
        try:
            self._store.set(f"told-{self._rank}-{trainer}", text)
        except RuntimeError as error:
            raise LinkError(f"the store is gone: {str(error)[:200]}") from error

    def told(self, engine: int) -> str | None:
        """What an engine's rank has left for this one. Raises LinkError."""
        key = f"told-{engine}-{self._rank}"
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError as error:
            raise LinkError(f"the store is gone: {str(error)[:200]}") from error

    def send(self, pairs: Sequence[tuple[torch.Tensor, int]], deadline: float) -> Transfer:
        """Begin to send each tensor to its engine rank."""
        return self._batch(dist.isend, pairs, deadline)

    def receive(self, pairs: Sequence[tuple[torch.Tensor, int]], deadline: float) -> Transfer:
        """Begin to fill each tensor by its trainer rank."""
        return self._batch(dist.irecv, pairs, deadline)

    def _batch(self, what: Any, pairs: Sequence[tuple[torch.Tensor, int]], deadline: float) -> Transfer:
        tensors = [tensor for tensor, _ in pairs]
        try:
            operations = [
                dist.P2POp(what, tensor, group=self.group, group_peer=peer) for tensor, peer in pairs
            ]
            return Transfer(dist.batch_isend_irecv(operations), tensors, deadline, self._given_up)
        except RuntimeError as error:
            raise LinkError(str(error).splitlines()[0][:200]) from error

    def _given_up(self) -> bool:
        try:
            return bool(self._store.check([_GIVEN_UP]))
        except RuntimeError:
            return True  # the first trainer rank is gone, and with it the store

    def close(self) -> None:
        """Leave. Others may be gone or waiting: NCCL must not wait for them."""
        if self._device.type == "cuda":
            _abort_process_group(self.group)
        else:
            dist.destroy_process_group(self.group)


def give_up(store: Any, name: str) -> None:
    """Let every member of the group ``name`` give up what is under way. From any thread."""
    PrefixStore(name, store).set(_GIVEN_UP, "")


def connect(address: str, port: int) -> TCPStore:
    """The store of a group that is to be joined. Raises LinkError, at once for one that is gone."""
    try:
        # The store's own client would try a closed port again and again until its time is up.
        socket.create_connection((address, port), JOIN_SECONDS).close()
        return TCPStore(address, port, None, False, timedelta(seconds=JOIN_SECONDS))
    except (RuntimeError, OSError) as error:
        raise LinkError(f"{address}:{port}: {str(error)[:200]}") from error
