"""A link inside one host: engine ranks read the trainer ranks' memory, also of the same GPU, where NCCL takes
one process alone.

A trainer rank shares its buffers (CUDA IPC, or a file of shared memory on CPUs) and says at the store where
in them each message stands; an engine rank copies it and says that it has.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_worker.weightsync.transport.ipc_handles import open_shared, share
from grpo_worker.weightsync.transport.rendezvous import TransferGroup, link_errors

_POLL = 0.0002  # seconds between two looks at the store
_SMALL = 4096  # bytes that travel by the store itself


@dataclass(frozen=True, slots=True)
class _Awaited:
    """``done`` when all ``keys`` are at the store."""

    members: "CudaIpcGroup"
    keys: Sequence[str]
    deadline: float
    done: Callable[[], None]

    def wait(self) -> None:
        self.members.await_words(self.keys, self.deadline)
        self.done()


class CudaIpcGroup(TransferGroup):
    """This process among members that are all on one host."""

    def __init__(
        self, store: Any, name: str, rank: int, world: int, trainers: int, device: torch.device
    ) -> None:
        """Returns when all are there. Raises LinkError."""
        super().__init__(store, name, rank, world, trainers, device)
        self._counts: dict[int, int] = {}  # of messages to or from each other member
        # (engine, identity of a buffer) -> its number; the buffer is kept, so that it stays the only one.
        self._shared: dict[tuple[int, int], tuple[int, torch.UntypedStorage]] = {}
        self._opened: dict[tuple[int, int], torch.Tensor] = {}  # (trainer, number) -> its bytes here

    def send(self, pairs: Sequence[tuple[torch.Tensor, int]], deadline: float) -> _Awaited:
        told, answers = [], []
        with link_errors():
            self._finish()  # what others read must be there
            for engine, tensors in _by_member(pairs).items():
                number = self._next(engine)
                places = [self._place(tensor, engine) for tensor in tensors]
                told.append(f"sent-{self._rank}-{engine}-{number}")
                answers.append(f"taken-{engine}-{self._rank}-{number}")
                self._store.set(told[-1], json.dumps(places))
        # Whoever takes is done with the store once it has said so: rank 0, whose it is, may leave then.
        return _Awaited(self, answers, deadline, lambda: self._forget([*told, *answers]))

    def receive(self, pairs: Sequence[tuple[torch.Tensor, int]], deadline: float) -> _Awaited:
        wanted = {
            (trainer, f"{trainer}-{self._rank}-{self._next(trainer)}"): tensors
            for trainer, tensors in _by_member(pairs).items()
        }
        return _Awaited(self, [f"sent-{k}" for _, k in wanted], deadline, lambda: self._take(wanted))

    def close(self) -> None:
        self._opened.clear()
        self._shared.clear()

    def await_words(self, keys: Sequence[str], deadline: float) -> None:
        """Until all ``keys`` are at the store. Raises LinkError."""
        with link_errors():
            self.wait_until(lambda: bool(self._store.check(list(keys))), deadline, _POLL)

    def _take(self, wanted: dict[tuple[int, str], list[torch.Tensor]]) -> None:
        with link_errors():
            for (trainer, key), tensors in wanted.items():
                for place, tensor in zip(json.loads(self._store.get(f"sent-{key}")), tensors, strict=True):
                    tensor.copy_(self._bytes(trainer, place).view(tensor.dtype).view(tensor.shape))
            self._finish()
            for trainer, key in sorted(wanted, reverse=True):  # rank 0, whose the store is, last
                number = key.rsplit("-", 1)[1]
                self._store.set(f"taken-{self._rank}-{trainer}-{number}", "")

    def _next(self, member: int) -> int:
        self._counts[member] = self._counts.get(member, 0) + 1
        return self._counts[member]

    def _forget(self, keys: Sequence[str]) -> None:
        with link_errors():
            for key in keys:
                self._store.delete_key(key)

    def _place(self, tensor: torch.Tensor, engine: int) -> dict[str, Any]:
        """Where the engine's rank finds the bytes of a contiguous tensor."""
        if tensor.nbytes <= _SMALL:
            return {"bytes": tensor.flatten().view(torch.uint8).tolist()}
        storage = tensor.untyped_storage()
        key = engine, storage._cdata
        if key not in self._shared:
            number = len(self._shared)
            self._shared[key] = number, storage
            self._store.set(f"buffer-{self._rank}-{engine}-{number}", json.dumps(share(storage)))
        start = tensor.data_ptr() - storage.data_ptr()
        return {"buffer": self._shared[key][0], "start": start, "nbytes": tensor.nbytes}

    def _bytes(self, trainer: int, place: dict[str, Any]) -> torch.Tensor:
        if "bytes" in place:
            return torch.tensor(place["bytes"], dtype=torch.uint8)
        key = trainer, int(place["buffer"])
        if key not in self._opened:
            told = self._store.get(f"buffer-{trainer}-{self._rank}-{key[1]}")
            self._opened[key] = open_shared(json.loads(told), self._device)
        return self._opened[key][place["start"] : place["start"] + place["nbytes"]]

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _by_member(pairs: Sequence[tuple[torch.Tensor, int]]) -> dict[int, list[torch.Tensor]]:
    found: dict[int, list[torch.Tensor]] = {}
    for tensor, member in pairs:
        found.setdefault(member, []).append(tensor)
    return found
