"""Environment of an SGLang server on the CPU of this machine, outside a pod."""

import os
import sys
from pathlib import Path

from grpo_devcluster import driver_stub
from grpo_operator.render.sglang_command import CPU_ENGINE_ENV


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the server; build the stub of the CUDA driver library in ``folder``."""
    driver_stub.build(folder / "libcuda.so.1")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"LD_LIBRARY_PATH": str(folder), "OMP_NUM_THREADS": "1", "PATH": path}
    return dict(os.environ) | CPU_ENGINE_ENV | own
