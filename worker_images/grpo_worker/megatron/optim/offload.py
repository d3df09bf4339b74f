"""Offload of tensors to host memory while they are not used."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from grpo_worker.profiling.progress import PROGRESS

Contents = Callable[[], Iterable[torch.Tensor]]


def _nothing() -> None:
    """Wait for nothing."""


class Offloadable:
    """A set of tensors that leave the device between uses.

    ``contents`` returns the current tensors. Their storages are resized to zero in place, so that all views
    of them are valid again after they return. ``kept``: the values are copied to pinned host memory;
    otherwise the tensors return with undefined values. Without ``enabled`` they stay on the device.
    ``finish``: waits for what still writes them.
    """

    def __init__(
        self, contents: Contents, enabled: bool, kept: bool = True, finish: Callable[[], None] = _nothing
    ) -> None:
        self._contents = contents
        self._enabled = enabled
        self._kept = kept
        self._finish = finish
        self._users = 1  # tensors are created on the device
        self._offloaded: list[tuple[torch.Tensor, int]] = []
        self._hosts: list[torch.Tensor] = []

    def acquire(self, finished: bool = True) -> None:
        """Bring the tensors to the device. Calls are counted: each needs its own ``release``.

        ``finished``: the caller reads them without waiting by itself for what still writes them.
        """
        if finished:
            self._finish()
        self._users += 1
        for number, (storage, size) in enumerate(self._offloaded):
            storage.untyped_storage().resize_(size)
            if self._kept:
                storage.copy_(self._hosts[number], non_blocking=True)
            PROGRESS.add("tensors moved")
        self._offloaded.clear()

    def release(self) -> None:
        """Undo one ``acquire``; after the last one, offload the tensors."""
        self._users -= 1
        if self._users or not self._enabled:
            return
        self._finish()
        for number, storage in enumerate(_storages(self._contents())):
            if self._kept:
                self._host(number, storage).copy_(storage)
            self._offloaded.append((storage, len(storage)))
            storage.untyped_storage().resize_(0)
            PROGRESS.add("tensors moved")

    @contextmanager
    def on_device(self, finished: bool = True) -> Iterator[None]:
        """Keep the tensors on the device while the context is open. ``finished``: see ``acquire``."""
        self.acquire(finished)
        try:
            yield
        finally:
            self.release()

    def host_copies(self) -> "HostCopies":
        """Return the copies in host memory of what is offloaded now; they are valid until it returns."""
        self._finish()  # what is not offloaded is read on the device
        if not self._kept:
            return HostCopies({})
        pairs = zip(self._offloaded, self._hosts, strict=False)  # more have been offloaded before
        return HostCopies({_identity(storage): host for (storage, _), host in pairs})

    def _host(self, number: int, storage: torch.Tensor) -> torch.Tensor:
        if number == len(self._hosts):
            self._hosts.append(torch.empty(0, dtype=torch.uint8))
        if len(self._hosts[number]) != len(storage):
            pinned = storage.is_cuda
            self._hosts[number] = torch.empty(len(storage), dtype=torch.uint8, pin_memory=pinned)
        return self._hosts[number]


class HostCopies:
    """Copies of offloaded storages, to read tensors without device memory."""

    def __init__(self, by_storage: Mapping[int, torch.Tensor]) -> None:
        """``by_storage``: copies as uint8 [bytes] by the identity of the offloaded storage."""
        self._by_storage = dict(by_storage)

    def __or__(self, other: "HostCopies") -> "HostCopies":
        return HostCopies(self._by_storage | other._by_storage)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view with the tensor's values: of the copy if it is offloaded, else of itself."""
        tensor = tensor.detach()
        host = self._by_storage.get(_identity(tensor))
        if host is None:
            return tensor
        view = torch.empty(0, dtype=tensor.dtype)
        return view.set_(host.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _identity(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage; an offloaded one has no address."""
    return int(tensor.untyped_storage()._cdata)


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return the distinct storages of the tensors as uint8 [bytes]."""
    by_address: dict[int, torch.Tensor] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in by_address:
            view = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            by_address[storage.data_ptr()] = view.set_(storage)
    return list(by_address.values())
