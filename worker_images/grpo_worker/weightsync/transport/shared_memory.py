"""Memory that processes of one host share by a file descriptor: of a GPU, or a memfd on CPUs.

A file descriptor can be passed to any container. A handle of cudaIpcGetMemHandle needs the PID namespace and
the /dev/shm of its process, and KubeRay gives each pod a /dev/shm of its own. Source: CUDA C++ programming
guide, virtual memory management.
"""

import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory with the descriptor by which another process opens it. ``data``: uint8 [bytes]."""

    data: torch.Tensor
    descriptor: int

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> "SharedMemory":
        """Allocate at least ``nbytes``, which live as long as ``data``. Raises RuntimeError, OSError."""
        if device.type == "cuda":
            return cls(*_allocate_on_gpu(nbytes, device))
        descriptor = os.memfd_create("grpo-shared-memory")
        os.ftruncate(descriptor, nbytes)
        return cls(_mapped_file(descriptor, nbytes), descriptor)

    def close(self) -> None:
        """Close the descriptor; memory that has been opened by it stays."""
        os.close(self.descriptor)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the whole memory."""
        return self.data.nbytes


def open_memory(descriptor: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Map another process's memory, uint8 [bytes], and close the descriptor.

    Memory of another GPU is mapped for ``device``. Raises RuntimeError, OSError.
    """
    try:
        if device.type == "cuda":
            return _open_on_gpu(descriptor, nbytes, device)
        return _mapped_file(descriptor, nbytes)
    finally:
        os.close(descriptor)


def _mapped_file(descriptor: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)


class _Mapping:
    """GPU memory as torch takes it from other libraries. It is unmapped when no tensor uses it any more."""

    def __init__(self, address: int, nbytes: int, handle: Any) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3,
        }  # fmt: skip
        weakref.finalize(self, _unmap, address, nbytes, handle).atexit = False


def _allocate_on_gpu(nbytes: int, device: torch.device) -> tuple[torch.Tensor, int]:
    from cuda.bindings import driver

    wanted = _properties(_index(device))
    minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    granularity = _result(driver.cuMemGetAllocationGranularity(wanted, minimum))
    size = -(-nbytes // granularity) * granularity
    handle = _result(driver.cuMemCreate(size, wanted, 0))
    descriptor = _result(driver.cuMemExportToShareableHandle(handle, _descriptors(), 0))
    return _mapped(handle, size, device), int(descriptor)


def _open_on_gpu(descriptor: int, nbytes: int, device: torch.device) -> torch.Tensor:
    from cuda.bindings import driver

    return _mapped(_result(driver.cuMemImportFromShareableHandle(descriptor, _descriptors())), nbytes, device)


def _mapped(handle: Any, nbytes: int, device: torch.device) -> torch.Tensor:
    from cuda.bindings import driver

    torch.zeros(1, device=device)  # makes CUDA's context in this thread
    address = _result(driver.cuMemAddressReserve(nbytes, 0, 0, 0))
    _result(driver.cuMemMap(address, nbytes, 0, handle, 0))
    # PyTorch copies between GPUs on the one that has the memory.
    owner = int(_result(driver.cuMemGetAllocationPropertiesFromHandle(handle)).location.id)
    access = [_access(index) for index in sorted({owner, _index(device)})]
    _result(driver.cuMemSetAccess(address, nbytes, access, len(access)))
    return torch.as_tensor(_Mapping(int(address), nbytes, handle))


def _access(index: int) -> Any:
    from cuda.bindings import driver

    access = driver.CUmemAccessDesc()
    access.location = _properties(index).location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def _unmap(address: int, nbytes: int, handle: Any) -> None:
    from cuda.bindings import driver

    driver.cuCtxSynchronize()  # a kernel that uses the memory may still run
    driver.cuMemUnmap(address, nbytes)
    driver.cuMemAddressFree(address, nbytes)
    driver.cuMemRelease(handle)


def _properties(index: int) -> Any:
    from cuda.bindings import driver

    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.requestedHandleTypes = _descriptors()
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = index
    return properties


def _descriptors() -> Any:
    from cuda.bindings import driver

    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _result(answer: tuple[Any, ...]) -> Any:
    """Return what a call of the driver returned. Raises RuntimeError."""
    code, *values = answer
    if int(code):
        raise RuntimeError(f"CUDA's driver: {code.name}")
    return values[0] if values else None
