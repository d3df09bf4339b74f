"""Transfer group within one host: engine ranks read the trainer ranks' memory.

It works between processes on one GPU too, where NCCL allows only one process. A trainer rank shares its
buffers (CUDA IPC; on CPUs a file of shared memory) and posts the place of each message at the store. The
engine rank copies the message and acknowledges it there.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from grpo_worker.weightsync.transport.rendezvous import Pairs, TransferError, TransferGroup, transfer_errors

_POLL_SECONDS = 0.0002  # between two looks at the store
_INLINE_BYTES = 4096  # messages up to this size travel through the store itself
_CUDA_FIELDS = ("device", "handle", "size", "offset", "counter", "counter_offset", "event", "wait")
_CPU_FIELDS = ("manager", "handle", "size")


@dataclass(frozen=True, slots=True)
class _IpcTransfer:
    """A transfer that ends with ``finish`` once all ``keys`` are at the store."""

    group: "CudaIpcGroup"
    keys: Sequence[str]
    deadline: float
    finish: Callable[[], None]

    def wait(self) -> None:
        self.group.await_keys(self.keys, self.deadline)
        self.finish()


class CudaIpcGroup(TransferGroup):
    """This process in a group whose members are all on one host."""

    def __init__(
        self, store: Any, name: str, rank: int, world: int, trainers: int, device: torch.device
    ) -> None:
        """Join; returns when all members have joined. Raises TransferError."""
        super().__init__(store, name, rank, world, trainers, device)
        self._counts: dict[int, int] = {}  # transfers to or from each other member
        # (engine, address of a storage object) -> its number. The storage is kept, so that no other storage
        # gets the same address.
        self._shared: dict[tuple[int, int], tuple[int, torch.UntypedStorage]] = {}
        self._opened: dict[tuple[int, int], torch.Tensor] = {}  # (trainer, number) -> the bytes, uint8

    def exchange(self, sends: Pairs, receives: Pairs, deadline: float) -> _IpcTransfer:
        """Trainer ranks only send, and engine ranks only receive: nothing is forwarded within one host."""
        if sends and receives:
            raise TransferError("a member that sends cannot receive at the same time by CUDA IPC")
        return self._receive(receives, deadline) if receives else self._send(sends, deadline)

    def _send(self, pairs: Pairs, deadline: float) -> _IpcTransfer:
        announced, acknowledged = [], []
        with transfer_errors():
            self._synchronize()  # engines read the bytes directly, so all kernels must have written them
            for engine, tensors in _by_member(pairs).items():
                number = self._next_number(engine)
                places = [self._place(tensor, engine) for tensor in tensors]
                announced.append(f"sent-{self._rank}-{engine}-{number}")
                acknowledged.append(f"taken-{engine}-{self._rank}-{number}")
                self._store.set(announced[-1], json.dumps(places))
        # An engine's acknowledgement is its last use of the store, so that rank 0, which owns the store, may
        # leave afterwards.
        return _IpcTransfer(
            self, acknowledged, deadline, lambda: self._delete_keys([*announced, *acknowledged])
        )

    def _receive(self, pairs: Pairs, deadline: float) -> _IpcTransfer:
        expected = {
            (trainer, f"{trainer}-{self._rank}-{self._next_number(trainer)}"): tensors
            for trainer, tensors in _by_member(pairs).items()
        }
        keys = [f"sent-{key}" for _, key in expected]
        return _IpcTransfer(self, keys, deadline, lambda: self._copy(expected))

    def close(self) -> None:
        self._opened.clear()
        self._shared.clear()

    def await_keys(self, keys: Sequence[str], deadline: float) -> None:
        """Wait until all ``keys`` are at the store. Raises TransferError."""
        with transfer_errors():
            self.wait_until(lambda: bool(self._store.check(list(keys))), deadline, _POLL_SECONDS)

    def _copy(self, expected: dict[tuple[int, str], list[torch.Tensor]]) -> None:
        with transfer_errors():
            for (trainer, key), tensors in expected.items():
                places = json.loads(self._store.get(f"sent-{key}"))
                for place, tensor in zip(places, tensors, strict=True):
                    tensor.copy_(self._bytes(trainer, place).view(tensor.dtype).view(tensor.shape))
            self._synchronize()
            # Acknowledge rank 0 last: it owns the store and may leave after that.
            for trainer, key in sorted(expected, reverse=True):
                number = key.rsplit("-", 1)[1]
                self._store.set(f"taken-{self._rank}-{trainer}-{number}", "")

    def _next_number(self, member: int) -> int:
        self._counts[member] = self._counts.get(member, 0) + 1
        return self._counts[member]

    def _delete_keys(self, keys: Sequence[str]) -> None:
        with transfer_errors():
            for key in keys:
                self._store.delete_key(key)

    def _place(self, tensor: torch.Tensor, engine: int) -> dict[str, Any]:
        """Return where an engine rank finds the bytes of a contiguous tensor."""
        if tensor.nbytes <= _INLINE_BYTES:
            return {"bytes": tensor.flatten().view(torch.uint8).tolist()}
        storage = tensor.untyped_storage()
        key = engine, storage._cdata
        if key not in self._shared:
            number = len(self._shared)
            self._shared[key] = number, storage
            self._store.set(f"buffer-{self._rank}-{engine}-{number}", json.dumps(_share(storage)))
        start = tensor.data_ptr() - storage.data_ptr()
        return {"buffer": self._shared[key][0], "start": start, "nbytes": tensor.nbytes}

    def _bytes(self, trainer: int, place: dict[str, Any]) -> torch.Tensor:
        if "bytes" in place:
            return torch.tensor(place["bytes"], dtype=torch.uint8)
        key = trainer, int(place["buffer"])
        if key not in self._opened:
            handle = self._store.get(f"buffer-{trainer}-{self._rank}-{key[1]}")
            self._opened[key] = _open_shared(json.loads(handle), self._device)
        return self._opened[key][place["start"] : place["start"] + place["nbytes"]]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _by_member(pairs: Pairs) -> dict[int, list[torch.Tensor]]:
    tensors: dict[int, list[torch.Tensor]] = {}
    for tensor, member in pairs:
        tensors.setdefault(member, []).append(tensor)
    return tensors


def _share(storage: Any) -> dict[str, Any]:
    """Return the handle of an untyped storage for another process. A CPU storage moves to shared memory."""
    fields = _CUDA_FIELDS if storage.is_cuda else _CPU_FIELDS
    values = storage._share_cuda_() if storage.is_cuda else storage._share_filename_cpu_()
    handle = dict(zip(fields, values, strict=True))
    return {field: value.hex() if isinstance(value, bytes) else value for field, value in handle.items()}


def _open_shared(handle: dict[str, Any], device: torch.device) -> torch.Tensor:
    """Return the bytes of a shared storage, uint8 [bytes], on ``device``. Raises RuntimeError."""
    values = {key: bytes.fromhex(value) if isinstance(value, str) else value for key, value in handle.items()}
    if device.type == "cuda":
        # Each process numbers GPUs in its own way, and memory of another GPU is read through this one.
        index = torch.cuda.current_device() if device.index is None else device.index
        arguments = (index, *(values[field] for field in _CUDA_FIELDS[1:]))
        storage = torch.UntypedStorage._new_shared_cuda(*arguments)
    else:
        storage = torch.UntypedStorage._new_shared_filename_cpu(*(values[field] for field in _CPU_FIELDS))
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
