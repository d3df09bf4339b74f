"""GPU types that the planner knows, by the vendors' data sheets."""

from dataclasses import dataclass
from enum import StrEnum


class GpuType(StrEnum):
    """Value of ``gpuType``."""

    A100 = "a100-80gb"
    H100 = "h100-80gb"
    H200 = "h200-141gb"
    B200 = "b200-180gb"


@dataclass(frozen=True, slots=True)
class Gpu:
    """Figures of one GPU. memory: bytes that the driver reports; speeds: bytes/s in one
    direction; flops: dense bf16. ``network``: its share of the node's InfiniBand (400 Gb/s)."""

    memory: int
    flops: float
    nvlink: float
    network: float

    @property
    def usable(self) -> int:
        """Memory less what CUDA, NCCL's channels, cuBLAS and the allocator's slack take."""
        return self.memory - RESERVED


RESERVED = 6 * 10**9

GPUS: dict[GpuType, Gpu] = {
    GpuType.A100: Gpu(memory=81_920 * 2**20, flops=312e12, nvlink=300e9, network=25e9),
    GpuType.H100: Gpu(memory=81_559 * 2**20, flops=989e12, nvlink=450e9, network=50e9),
    GpuType.H200: Gpu(memory=143_771 * 2**20, flops=989e12, nvlink=450e9, network=50e9),
    GpuType.B200: Gpu(memory=183_359 * 2**20, flops=2250e12, nvlink=900e9, network=50e9),
}
