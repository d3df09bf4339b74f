"""A shim of NVIDIA's library NVML, compiled from nvml_shim.c, for processes on machines without a GPU.

It is not NVML: it shows that the product makes NVML's calls and understands the answers, as far as the shim
answers like NVML. Which counters a real GPU raises for which fault it cannot show.
"""

import os
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")


class NvmlShim:
    """One library and the file that it answers from, in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._state = folder / "nvml.txt"
        self._folder = folder
        library = folder / "libnvidia-ml.so.1"
        command = ["cc", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(library), str(_SOURCE)]
        subprocess.run(command, check=True)

    def set(self, *lines: str) -> None:
        """Replace the state at once. The lines: see nvml_shim.c."""
        fresh = self._state.with_suffix(".new")
        fresh.write_text("\n".join(lines) + "\n")
        fresh.replace(self._state)

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a process that finds the shim as its NVML."""
        return os.environ | {"LD_LIBRARY_PATH": str(self._folder), "NVML_SHIM": str(self._state)}
