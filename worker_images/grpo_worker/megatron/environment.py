"""Environment variables that Transformer Engine reads when it is imported."""

import importlib.util
import os
from pathlib import Path


def prepare() -> None:
    """Set the variables, unless the user has. Call this before ``megatron.core`` is imported."""
    # Transformer Engine prefers a cuDNN of the system. Beside torch's own, the first attention fails with
    # CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED.
    home = _torchs_cudnn()
    if home is not None:
        os.environ.setdefault("CUDNN_HOME", str(home))
    # Scales of FP8 blocks in fp32, as DeepSeek's format and the engines have them, not powers of two.
    os.environ.setdefault("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    # Megatron-Core announces offloaded activations to this version of Transformer Engine's module only.
    # Without the announcement, products forget the weights to which their gradients belong.
    os.environ.setdefault("NVTE_CPU_OFFLOAD_V1", "1")


def _torchs_cudnn() -> Path | None:
    """Return the folder of the cuDNN that came with torch, or None if torch uses the system's."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return None
    home = Path(torch.origin).parents[1] / "nvidia/cudnn"
    return home if home.is_dir() else None
