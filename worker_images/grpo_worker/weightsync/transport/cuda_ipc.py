"""Transfer group within one host: engine ranks read the trainer ranks' memory.

It works between processes on one GPU too, where NCCL allows only one process. A trainer rank passes the
descriptors of its buffers to the engine ranks (shared_memory.py) and posts the place of each message at the
store. The engine rank copies the message and acknowledges it there.
"""

import json
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from grpo_worker.weightsync.transport import descriptors
from grpo_worker.weightsync.transport.descriptors import Listener
from grpo_worker.weightsync.transport.rendezvous import Pairs, TransferError, TransferGroup, transfer_errors
from grpo_worker.weightsync.transport.shared_memory import SharedMemory, open_memory

_POLL_SECONDS = 0.0002  # between two looks at the store
_INLINE_BYTES = 4096  # messages up to this size travel through the store itself


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
        self._counts: dict[int, int] = {}  # transfers to or from each other member
        self._buffers: list[SharedMemory] = []  # of a trainer rank, by their numbers
        self._passed: set[tuple[int, int]] = set()  # (engine, number) of buffers that it has
        self._opened: dict[tuple[int, int], torch.Tensor] = {}  # (trainer, number) -> the bytes, uint8
        self._sockets: dict[int, socket.socket] = {}  # to each other member that this one exchanges with
        with transfer_errors():
            listener = Listener(world - trainers) if rank < trainers else None
        try:
            super().__init__(store, name, rank, world, trainers, device)
            if listener:
                self._await_engines(listener)
            else:
                self._call(range(trainers))
        finally:
            if listener:
                listener.close()

    def _await_engines(self, listener: Listener) -> None:
        with transfer_errors():
            self._store.set(f"listener-{self._rank}", str(listener.path))
            self.wait_for(listener.complete, lambda: "an engine rank did not connect")
        self._sockets = listener.sockets

    def _call(self, trainers: range) -> None:
        for trainer in trainers:
            self.wait_for(partial(self._listens, trainer), lambda: "a trainer rank does not listen")
            path = self._store.get(f"listener-{trainer}").decode()
            try:
                self._sockets[trainer] = descriptors.call(path, self._rank)
            except OSError as error:
                raise TransferError(
                    f"{path} of trainer rank {trainer} is not reached ({error}): do both pods mount it?"
                ) from error
        self.beat()

    def _listens(self, trainer: int) -> bool:
        return bool(self._store.check([f"listener-{trainer}"]))

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return memory that engine ranks can open: uint8 [nbytes]. Raises TransferError."""
        if not nbytes:
            return super().buffer(0)
        with transfer_errors():
            self._buffers.append(SharedMemory.allocate(nbytes, self._device))
        return self._buffers[-1].data[:nbytes]

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
        for connection in self._sockets.values():
            connection.close()
        for buffer in self._buffers:
            buffer.close()
        self._opened.clear()
        self._buffers.clear()
        self._passed.clear()

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
        number, buffer = self._buffer_of(tensor)
        if (engine, number) not in self._passed:
            shared = number, buffer.nbytes, buffer.descriptor
            descriptors.pass_on(self._sockets[engine], shared)
            self._passed.add((engine, number))
        start = tensor.data_ptr() - buffer.data.data_ptr()
        return {"buffer": number, "start": start, "nbytes": tensor.nbytes}

    def _buffer_of(self, tensor: torch.Tensor) -> tuple[int, SharedMemory]:
        for number, buffer in enumerate(self._buffers):
            if 0 <= tensor.data_ptr() - buffer.data.data_ptr() <= buffer.nbytes - tensor.nbytes:
                return number, buffer
        raise TransferError(f"{tensor.nbytes} bytes are not in a buffer() of the group, and cannot be shared")

    def _bytes(self, trainer: int, place: dict[str, Any]) -> torch.Tensor:
        if "bytes" in place:
            return torch.tensor(place["bytes"], dtype=torch.uint8)
        key = trainer, int(place["buffer"])
        while key not in self._opened:
            missing = f"buffer {key[1]} of trainer rank {trainer} did not come"
            number, nbytes, descriptor = descriptors.take(self._sockets[trainer], missing)
            self._opened[trainer, number] = open_memory(descriptor, nbytes, self._device)
        return self._opened[key][place["start"] : place["start"] + place["nbytes"]]

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _by_member(pairs: Pairs) -> dict[int, list[torch.Tensor]]:
    tensors: dict[int, list[torch.Tensor]] = {}
    for tensor, member in pairs:
        tensors.setdefault(member, []).append(tensor)
    return tensors
