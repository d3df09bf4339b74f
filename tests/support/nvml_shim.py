"""A shim of NVIDIA's library NVML, compiled from nvml_shim.c, for processes on machines without a GPU.

It is not NVML: it shows that the product makes NVML's calls and understands the answers, as far as the shim
answers like NVML. Which counters a real GPU raises for which fault it cannot show.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_suffix(".c")
_IN_PODS = "/opt/nvml-shim"
# A GPU that works, on fewer PCIe lanes than it has: degraded, which moves no pod.
DEGRADED = ("gpus 1", "0 uuid GPU-narrow", "0 utilization 93", "0 pcie_width 8", "0 pcie_width_max 16")


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
        return os.environ | self._variables(self._folder)

    def pod_spec(self, containers: str) -> dict[str, Any]:
        """Return the ``podTemplate.spec`` with which a pod's agent finds the shim as its NVML.

        ``containers``: the list of the PodSpec that has the agent.
        """
        self._folder.chmod(0o755)  # the agent is another user
        volume = {"name": "nvml", "hostPath": {"path": str(self._folder), "type": "Directory"}}
        variables = self._variables(Path(_IN_PODS))
        agent = {
            "name": "agent",
            "env": [{"name": name, "value": value} for name, value in variables.items()],
            "volumeMounts": [{"name": "nvml", "mountPath": _IN_PODS, "readOnly": True}],
        }
        return {"volumes": [volume], containers: [agent]}

    def _variables(self, folder: Path) -> dict[str, str]:
        return {"LD_LIBRARY_PATH": str(folder), "NVML_SHIM": str(folder / self._state.name)}
