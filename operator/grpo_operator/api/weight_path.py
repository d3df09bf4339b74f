"""Path of a weight version from the trainer ranks into the engines, resolved from ``spec.weightSync``."""

from enum import StrEnum
from typing import Literal

from grpo_operator.api.messages import Message


class Backend(StrEnum):
    """Transport of a direct transfer, which copies weights from trainer ranks into engine ranks.

    NCCL and GLOO: a process group for each engine, between GPUs and between CPUs. CUDA_IPC: engine ranks read
    the memory of trainer ranks on the same host; also of the same GPU, where NCCL allows one process only.
    """

    NCCL = "nccl"
    GLOO = "gloo"
    CUDA_IPC = "cuda-ipc"


class WeightPath(Message):
    """Path of every weight version of one job.

    ``direct``: backend of direct transfers; None: every version is staged in the agents' host memory.
    ``staged``: how a rollout agent reads a staged version from the trainers' agents. Staging is also the
    fallback of direct transfers: for engines that join late, and after a failed transfer.
    ``delta``: agents fetch only the bytes that changed since the previous version.
    """

    direct: Backend | None = None
    staged: Literal["http", "nixl"] = "http"
    delta: bool = False

    def __str__(self) -> str:
        staged = f"{self.staged} (delta)" if self.delta else self.staged
        return f"{self.direct}, else {staged}" if self.direct else staged
