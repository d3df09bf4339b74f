"""The cuDNN that Transformer Engine loads: torch's own, where torch came with one."""

import importlib.util
import os
from pathlib import Path


def prefer_torchs() -> None:
    """Let Transformer Engine load the cuDNN beside torch. Call this before ``megatron.core`` is imported.

    Transformer Engine prefers a cuDNN of the system. Two versions in a process fail at the first attention,
    with CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED.
    """
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None:
        return
    home = Path(torch.origin).parents[1] / "nvidia/cudnn"
    if home.is_dir():
        os.environ.setdefault("CUDNN_HOME", str(home))
