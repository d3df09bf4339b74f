"""Numbers that the host computes and a kernel reads, such as addresses."""

import numpy as np
import numpy.typing as npt
import torch

Numbers = npt.NDArray[np.int64]


def replace(on_device: torch.Tensor, numbers: Numbers) -> None:
    """Overwrite ``on_device`` (int64, of the same shape) on the current stream, and do not wait for it."""
    host = torch.from_numpy(numbers)
    on_device.copy_(host.pin_memory() if on_device.is_cuda else host, non_blocking=True)
