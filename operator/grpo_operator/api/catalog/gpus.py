"""GPU types known to the planner. Source of the figures: NVIDIA's data sheets."""

from dataclasses import dataclass
from enum import StrEnum


class GpuType(StrEnum):
    """Values of the field ``gpuType``."""

    A100 = "a100-80gb"
    H100 = "h100-80gb"
    H200 = "h200-141gb"
    B200 = "b200-180gb"


@dataclass(frozen=True, slots=True)
class Gpu:
    """Capacity of one GPU.

    ``memory``: bytes that the driver reports. ``bandwidth``: bytes per second of the GPU's memory. ``flops``:
    dense bf16 operations per second. ``nvlink`` and ``network``: bytes per second in one direction;
    ``network`` is the GPU's share of the node's InfiniBand adapters (400 Gb/s; A100: 200 Gb/s).
    """

    memory: int
    bandwidth: float
    flops: float
    nvlink: float
    network: float

    @property
    def usable(self) -> int:
        """Return the memory in bytes without the part for CUDA, cuBLAS and allocator fragmentation."""
        return self.memory - RESERVED


RESERVED = 6 * 10**9

GPUS: dict[GpuType, Gpu] = {
    GpuType.A100: Gpu(memory=81_920 * 2**20, bandwidth=2.039e12, flops=312e12, nvlink=300e9, network=25e9),
    GpuType.H100: Gpu(memory=81_559 * 2**20, bandwidth=3.35e12, flops=989e12, nvlink=450e9, network=50e9),
    GpuType.H200: Gpu(memory=143_771 * 2**20, bandwidth=4.8e12, flops=989e12, nvlink=450e9, network=50e9),
    GpuType.B200: Gpu(memory=183_359 * 2**20, bandwidth=8e12, flops=2250e12, nvlink=900e9, network=50e9),
}
