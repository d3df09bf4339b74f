"""Memory of one process that another of the same host reads: CUDA IPC for GPUs, a file in memory for CPUs."""

from typing import Any

import torch

_CUDA = ("device", "handle", "size", "offset", "counter", "counter_offset", "event", "wait")
_CPU = ("manager", "handle", "size")


def share(storage: Any) -> dict[str, Any]:
    """How another process opens an untyped ``storage``, as JSON. A CPU's moves into shared memory."""
    names = _CUDA if storage.is_cuda else _CPU
    values = storage._share_cuda_() if storage.is_cuda else storage._share_filename_cpu_()
    told = dict(zip(names, values, strict=True))
    return {key: value.hex() if isinstance(value, bytes) else value for key, value in told.items()}


def open_shared(told: dict[str, Any], device: torch.device) -> torch.Tensor:
    """Its bytes, uint8 [bytes of the storage], on this process' ``device``. Raises RuntimeError."""
    values = {k: bytes.fromhex(v) if isinstance(v, str) else v for k, v in told.items()}
    if device.type == "cuda":
        # The same GPU has another number in each process, and one of another GPU is read through this one.
        index = torch.cuda.current_device() if device.index is None else device.index
        arguments = (index, *(values[kind] for kind in _CUDA[1:]))
        storage = torch.UntypedStorage._new_shared_cuda(*arguments)
    else:
        storage = torch.UntypedStorage._new_shared_filename_cpu(*(values[kind] for kind in _CPU))
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
