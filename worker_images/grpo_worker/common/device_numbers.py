"""Numbers that the host computes and a kernel reads, such as addresses."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.int64]


class DeviceNumbers:
    """Numbers on a device that the host replaces. ``on_device``: int64 [size].

    Their copy in page-locked memory is allocated once: every such allocation waits for the work of the GPU.
    """

    def __init__(self, on_device: torch.Tensor, host: torch.Tensor) -> None:
        self.on_device = on_device
        self._host = host

    @classmethod
    def zeros(cls, size: int, device: torch.device) -> "DeviceNumbers":
        """Return ``size`` zeros on a device."""
        host = torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        return cls(torch.zeros(size, dtype=torch.int64, device=device), host)

    def split(self, sizes: Sequence[int]) -> "list[DeviceNumbers]":
        """Return parts of these sizes, which share the memory. ``sizes`` add up to the size."""
        both = [torch.split(numbers, list(sizes)) for numbers in (self.on_device, self._host)]
        return [DeviceNumbers(*parts) for parts in zip(*both, strict=True)]

    def replace(self, numbers: Numbers) -> None:
        """Overwrite the first numbers on the current stream, and do not wait for it.

        What the stream had to do for the last replacement must be done.
        """
        self._host[: len(numbers)].numpy()[:] = numbers
        self.on_device[: len(numbers)].copy_(self._host[: len(numbers)], non_blocking=True)
