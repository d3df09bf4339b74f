"""The members of a link, all trainer ranks and then all engine ranks, and the store at which they meet."""

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

JOIN_SECONDS = 60.0
_LOOK = 0.05  # seconds between two looks at whether all have come: hundreds look
_ASK = 0.5  # seconds between two looks at whether another member gave up
_GIVEN_UP = "given-up"


class TransferError(RuntimeError):
    """A member of the link is missing, or did not send or take its bytes in time."""


@contextmanager
def link_errors() -> Iterator[None]:
    """What torch, its stores and its groups raise for a lost member, as LinkError."""
    try:
        yield
    except RuntimeError as error:
        raise TransferError(str(error).splitlines()[0][:200]) from error


class Transfer(Protocol):
    """Bytes under way."""

    def wait(self) -> None:
        """Until they are there, or have left. Raises LinkError at the deadline, or for a lost member."""
        ...


class TransferGroup(ABC):
    """This process among ``world`` members of the link ``name``, the first ``trainers`` of which send."""

    def __init__(
        self, store: Any, name: str, rank: int, world: int, trainers: int, device: torch.device
    ) -> None:
        """Returns when all are there. Raises LinkError."""
        self._store = PrefixStore(name, store)
        self._rank = rank
        self._device = device
        self.engines = range(trainers, world)
        try:
            self._assemble(world)
        except RuntimeError as error:
            raise TransferError(f"the group {name} did not form: {str(error)[:200]}") from error

    @abstractmethod
    def send(self, pairs: Sequence[tuple[torch.Tensor, int]], deadline: float) -> Transfer:
        """Begin to send each tensor to its engine rank; they must stay as they are until then."""

    @abstractmethod
    def receive(self, pairs: Sequence[tuple[torch.Tensor, int]], deadline: float) -> Transfer:
        """Begin to fill each tensor by its trainer rank."""

    @abstractmethod
    def close(self) -> None:
        """Leave. Others may be gone or waiting."""

    def tell(self, trainer: int, text: str) -> None:
        """Leave a word of this rank for a trainer rank. Raises LinkError."""
        try:
            self._store.set(f"told-{self._rank}-{trainer}", text)
        except RuntimeError as error:
            raise TransferError(f"the store is gone: {str(error)[:200]}") from error

    def told(self, engine: int) -> str | None:
        """What an engine's rank has left for this one. Raises LinkError."""
        key = f"told-{engine}-{self._rank}"
        try:
            return self._store.get(key).decode() if self._store.check([key]) else None
        except RuntimeError as error:
            raise TransferError(f"the store is gone: {str(error)[:200]}") from error

    def wait_until(self, done: Callable[[], bool], deadline: float, pause: float) -> None:
        """Look each ``pause`` seconds. Raises LinkError at the deadline, or when another member gave up."""
        asked = time.monotonic()
        while not done():
            now = time.monotonic()
            if now > deadline:
                raise TransferError("not done within the deadline")
            if now > asked + _ASK:
                asked = now
                if self._given_up():
                    raise TransferError("another member gave up")
            time.sleep(pause)

    def _given_up(self) -> bool:
        try:
            return bool(self._store.check([_GIVEN_UP]))
        except RuntimeError:
            return True  # the first trainer rank is gone, and with it the store

    def _assemble(self, world: int) -> None:
        """Until every member has come: only from here on do they wait for each other in a way that cannot be
        given up. Raises LinkError."""
        deadline = time.monotonic() + JOIN_SECONDS
        self._store.set(f"here-{self._rank}", "")
        if self._store.add("here", 1) == world:
            self._store.set("complete", "")
        while not self._store.check(["complete"]):
            if self._given_up():
                raise TransferError("another member gave up")
            if time.monotonic() > deadline:
                missing = [member for member in range(world) if not self._store.check([f"here-{member}"])]
                raise TransferError(f"ranks {missing} did not come in {JOIN_SECONDS:.0f} s")
            time.sleep(_LOOK)


def give_up(store: Any, name: str) -> None:
    """Let every member of the link ``name`` give up what is under way. From any thread."""
    PrefixStore(name, store).set(_GIVEN_UP, "")


def connect(address: str, port: int) -> TCPStore:
    """The store of a group that is to be joined. Raises LinkError, at once for one that is gone."""
    try:
        # The store's own client would try a closed port again and again until its time is up.
        socket.create_connection((address, port), JOIN_SECONDS).close()
        return TCPStore(address, port, None, False, timedelta(seconds=JOIN_SECONDS))
    except (RuntimeError, OSError) as error:
        raise TransferError(f"{address}:{port}: {str(error)[:200]}") from error
