"""Tensors that wait in host memory while nobody computes with them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

Contents = Callable[[], Iterable[torch.Tensor]]


class Offloadable:
    """A set of tensors that may leave the device between uses.

    ``contents`` says which they are by now. Their storages are emptied in place, so that all views of
    them hold again when they come back. ``kept``: with their values; otherwise they come back
    undefined. Without ``enabled`` they stay where they are.
    """

    def __init__(self, contents: Contents, enabled: bool, kept: bool = True) -> None:
        self._contents = contents
        self._enabled = enabled
        self._kept = kept
        self._users = 1  # they are on the device when they are made
        self._away: list[tuple[torch.Tensor, int]] = []
        self._hosts: list[torch.Tensor] = []

    def fetch(self) -> None:
        """They are needed now. Calls count: each asks for its own ``release``."""
        self._users += 1
        for number, (storage, size) in enumerate(self._away):
            storage.untyped_storage().resize_(size)
            if self._kept:
                storage.copy_(self._hosts[number], non_blocking=True)
        self._away.clear()

    def release(self) -> None:
        """One user less; with the last they leave."""
        self._users -= 1
        if self._users or not self._enabled:
            return
        for number, storage in enumerate(_storages(self._contents())):
            if self._kept:
                self._host(number, storage).copy_(storage)
            self._away.append((storage, len(storage)))
            storage.untyped_storage().resize_(0)

    @contextmanager
    def here(self) -> Iterator[None]:
        """They are on the device for the time being."""
        self.fetch()
        try:
            yield
        finally:
            self.release()

    def _host(self, number: int, storage: torch.Tensor) -> torch.Tensor:
        if number == len(self._hosts):
            self._hosts.append(torch.empty(0, dtype=torch.uint8))
        if len(self._hosts[number]) != len(storage):
            pinned = storage.is_cuda
            self._hosts[number] = torch.empty(len(storage), dtype=torch.uint8, pin_memory=pinned)
        return self._hosts[number]


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The storages behind the tensors, each once, as uint8 [bytes]."""
    found: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in found:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            found[storage.data_ptr()] = whole.set_(storage)
    return list(found.values())
