"""Host memory that checkpoints are copied to: pinned beside a GPU, and used again by later checkpoints."""

import logging
import mmap
from collections import defaultdict
from contextlib import suppress

import torch

log = logging.getLogger(__name__)


class Block:
    """Bytes of host memory in pages of their own.

    Beside a GPU they are pinned, because a copy to other memory takes several times as long. Large pages make
    that quick.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a kernel without large pages
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        if torch.cuda.is_available():
            self._pin()

    def tensor(self, dtype: torch.dtype, elements: int, offset: int = 0) -> torch.Tensor:
        """Return ``elements`` values from byte ``offset`` on, as a tensor whose storage has nothing else."""
        return torch.frombuffer(self.memory, dtype=dtype, count=elements, offset=offset)

    def _pin(self) -> None:
        address = self.tensor(torch.uint8, self.size).data_ptr()
        error = int(torch.cuda.cudart().cudaHostRegister(address, self.size, 0))  # type: ignore[no-untyped-call]
        if error:
            log.warning("%d bytes for a checkpoint cannot be pinned (CUDA error %d)", self.size, error)


class HostPool:
    """Blocks for the tensors of checkpoints, and which of them the current checkpoint uses."""

    def __init__(self) -> None:
        self._free: defaultdict[int, list[Block]] = defaultdict(list)  # by their size
        self._used: dict[int, tuple[Block, int]] = {}  # block and offset, by address

    def create(self, elements: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor [elements] without values for the current checkpoint."""
        size = max(elements, 1) * dtype.itemsize
        block = self._free[size].pop() if self._free[size] else Block(size)
        return self._known(block, dtype, max(elements, 1), 0)[:elements]

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor. Values of a GPU are in it after the next synchronization."""
        copy = self.create(tensor.numel(), tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor.detach(), non_blocking=True)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is one of the current checkpoint, or a part of one."""
        return tensor.device.type == "cpu" and tensor.untyped_storage().data_ptr() in self._used

    def exact(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a part of a tensor of the checkpoint with a storage of its own, without a copy.

        Writers write whole storages, and copy a tensor that shares one. Other tensors are returned as they
        are.
        """
        if tensor not in self or not tensor.is_contiguous() or not tensor.numel():
            return tensor
        block, offset = self._used[tensor.untyped_storage().data_ptr()]
        offset += int(tensor.storage_offset()) * tensor.dtype.itemsize
        return self._known(block, tensor.dtype, tensor.numel(), offset).view(tensor.shape)

    def end(self) -> list[Block]:
        """End the current checkpoint and return its blocks, which are to be given back once it is written."""
        blocks = list({id(block): block for block, _ in self._used.values()}.values())
        self._used.clear()
        return blocks

    def give_back(self, blocks: list[Block]) -> None:
        """Take blocks back for later checkpoints."""
        for block in blocks:
            self._free[block.size].append(block)

    def _known(self, block: Block, dtype: torch.dtype, elements: int, offset: int) -> torch.Tensor:
        tensor = block.tensor(dtype, elements, offset)
        self._used[tensor.data_ptr()] = block, offset
        return tensor


POOL = HostPool()
