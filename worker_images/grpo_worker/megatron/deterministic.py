"""Kernels and collectives that add in a fixed order, so that a repeated step has the same bits."""

import os

import torch
import torch.utils.deterministic

_ENVIRONMENT = {
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",  # of Transformer Engine's attention
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # without it cuBLAS chooses among workspaces of several streams
    "NCCL_ALGO": "Ring",  # otherwise NCCL chooses by message size and by what it measures of the network
}


def require_deterministic() -> None:
    """Let this process use no other kernels and collectives; one that has no such form raises RuntimeError.

    Call this before the first collective and before a model is built, which read the variables.
    """
    os.environ |= _ENVIRONMENT
    torch.use_deterministic_algorithms(True)
    # Filling new tensors costs time and only helps to find bugs.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
