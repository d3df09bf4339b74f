"""Rendezvous of a transfer group at a store, and the base class of its members."""

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from grpo_worker.common.polling import pause_after
from grpo_worker.profiling.progress import PROGRESS

JOIN_SECONDS = 60.0  # to connect to the store, and then again for all members to join
_JOIN_POLL_SECONDS = 0.05  # at first: hundreds of members of each link poll one store
_GIVEN_UP_POLL_SECONDS = 0.5  # between two looks at whether another member gave up
_GIVEN_UP = "given-up"


Pairs = Sequence[tuple[torch.Tensor, int]]  # tensors, each with the other member


class TransferError(RuntimeError):
    """A member of the transfer group is missing, or did not send or receive its bytes in time."""


@contextmanager
def transfer_errors() -> Iterator[None]:
    """Convert errors of torch, its stores and its groups, and of sockets and memory, into TransferErrors."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        raise TransferError(str(error).splitlines()[0][:200]) from error


class Transfer(Protocol):
    """A transfer in progress."""

    def wait(self) -> None:
        """Wait until the bytes were sent or received.

        Raises TransferError at the deadline or for a lost member.
        """
        ...


class TransferGroup(ABC):
    """This process as a member of a transfer group: trainer ranks first, which send, then engine ranks."""

    def __init__(
        self, store: Any, name: str, rank: int, world: int, trainers: int, device: torch.device
    ) -> None:
        """Join as member ``rank`` of ``world``, the first ``trainers`` of which send.

        Returns when all members have joined. Raises TransferError.
        """
        self._store = PrefixStore(name, store)
        self._rank = rank
        self._device = device
        self.engines = range(trainers, world)
        try:
            self._await_members(world)
        except RuntimeError as error:
            raise TransferError(f"the group {name} did not form: {str(error)[:200]}") from error

    @abstractmethod
    def exchange(self, sends: Pairs, receives: Pairs, deadline: float) -> Transfer:
        """Start to send tensors to members, and to fill others from members, all at the same time.

        Tensors must not change until the transfer ends. Two members exchange tensors in equal order.
        """

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return memory on this member's device out of which it sends: uint8 [nbytes], not initialized."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def send(self, pairs: Pairs, deadline: float) -> Transfer:
        """Start to send each tensor to its engine rank. Tensors must not change until the transfer ends."""
        return self.exchange(pairs, (), deadline)

    def receive(self, pairs: Pairs, deadline: float) -> Transfer:
        """Start to fill each tensor from its trainer rank."""
        return self.exchange((), pairs, deadline)

    def connect(self, to: Sequence[int], of: Sequence[int]) -> None:
        """Send a byte to each of the members ``to``, and receive one from each of the members ``of``.

        A group connects two members when they first exchange something, which takes longer than the transfer
        of a version. Raises TransferError.
        """

        def byte() -> torch.Tensor:
            return torch.zeros(1, dtype=torch.uint8, device=self._device)

        sends, receives = [(byte(), member) for member in to], [(byte(), member) for member in of]
        if sends or receives:
            self.exchange(sends, receives, time.monotonic() + JOIN_SECONDS).wait()

    @abstractmethod
    def close(self) -> None:
        """Leave the group. Other members may be gone or waiting."""

    def wait_until(self, done: Callable[[], bool], deadline: float, pause: float) -> None:
        """Call ``done`` every ``pause`` seconds until it returns true.

        Raises TransferError at the deadline, or when another member gave up.
        """
        checked = time.monotonic()
        while not done():
            now = time.monotonic()
            if now > deadline:
                raise TransferError("not done within the deadline")
            if now > checked + _GIVEN_UP_POLL_SECONDS:
                checked = now
                if self._given_up():
                    raise TransferError("another member gave up")
            time.sleep(pause)

    def _given_up(self) -> bool:
        try:
            return bool(self._store.check([_GIVEN_UP]))
        except RuntimeError:
            return True  # the first trainer rank is gone, and the store with it

    def _await_members(self, world: int) -> None:
        """Wait until every member is present. Raises TransferError.

        Later waits of a forming process group cannot be interrupted, so they start only when all are here.
        """
        self._store.set(f"here-{self._rank}", "")
        # A counter: with hundreds of members, checking each of them costs too many requests.
        if self._store.add("here", 1) == world:
            self._store.set("complete", "")
        self.wait_for(lambda: bool(self._store.check(["complete"])), lambda: self._missing(world))

    def wait_for(self, done: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Wait for something that other members do at the store.

        Raises TransferError when another member gave up, and when none has made progress (come, or beaten)
        for JOIN_SECONDS. ``missing``: describes what is waited for.
        """
        progress, deadline, began = -1, 0.0, time.monotonic()
        while not done():
            if self._given_up():
                raise TransferError("another member gave up")
            now, seen = time.monotonic(), self._store.add("here", 0) + self._store.add("beats", 0)
            if seen != progress:
                progress, deadline = seen, now + JOIN_SECONDS
                PROGRESS.add("signs of members of a link")
            if now > deadline:
                raise TransferError(f"{missing()} in {JOIN_SECONDS:.0f} s")
            time.sleep(pause_after(now - began, _JOIN_POLL_SECONDS))

    def beat(self) -> None:
        """Tell the other members, which wait for this one, that it has made progress."""
        self._store.add("beats", 1)

    def _missing(self, world: int) -> str:
        absent = [member for member in range(world) if not self._store.check([f"here-{member}"])]
        return f"ranks {absent} did not come"


def give_up(store: Any, name: str) -> None:
    """Make every member of the transfer group ``name`` end its waits. Can be called from any thread."""
    PrefixStore(name, store).set(_GIVEN_UP, "")


def connect(address: str, port: int) -> TCPStore:
    """Connect to the store of a group. Raises TransferError, without a delay when the store is gone."""
    try:
        # TCPStore retries a closed port until its timeout, so try a plain connection first.
        socket.create_connection((address, port), JOIN_SECONDS).close()
        return TCPStore(address, port, None, False, timedelta(seconds=JOIN_SECONDS))
    except (RuntimeError, OSError) as error:
        raise TransferError(f"{address}:{port}: {str(error)[:200]}") from error
