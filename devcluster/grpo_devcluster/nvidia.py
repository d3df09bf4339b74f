"""NVIDIA's device plugin, which lets pods ask for ``nvidia.com/gpu`` and see no other GPUs than their own.

The plugin writes a CDI specification (device nodes, the driver's libraries, hooks), and containerd applies
the entries that kubelet names for a pod. So pods need no privileges, and runc is the only runtime.
"""

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from grpo_devcluster import processes
from grpo_devcluster.addons import kubectl
from grpo_devcluster.gobuild import binary
from grpo_devcluster.paths import PACK
from grpo_devcluster.settings import NODE
from grpo_devcluster.stages import StageError, run, wait_for

RESOURCE = "nvidia.com/gpu"
LABEL = "nvidia.com/gpu.present=true"
LIBRARY = "libnvidia-ml.so.1"
_CONTROL = Path("/dev/nvidiactl")
_LOADER = Path("/etc/ld.so.conf.d/grpo-devcluster-nvidia.conf")
_SPECIFICATION = Path("/var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json")
_SOCKETS = Path("/var/lib/kubelet/device-plugins")  # the same for every kubelet, whatever its root is
_REMEDY = "Is /etc writable, and does the driver's folder have libcuda.so.1?"
_PLACES = (Path("/usr/local/nvidia/lib64"), Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"))


def present() -> bool:
    """Return whether this machine has NVIDIA GPUs for pods, and the pack with which pods get them."""
    return PACK is not None and _CONTROL.exists()


def driver_folder(search_path: str, places: Iterable[Path] = _PLACES) -> Path:
    """Return the folder of the driver's libraries. ``search_path``: as LD_LIBRARY_PATH, searched first."""
    folders = [*(Path(part) for part in search_path.split(":") if part), *places]
    for folder in folders:
        if (folder / LIBRARY).exists():
            return folder
    searched = ", ".join(str(folder) for folder in folders)
    raise StageError(f"{LIBRARY} is in none of {searched}. Put the driver's folder into LD_LIBRARY_PATH.")


def plugin_command(plugin: Path, hook: Path) -> list[str]:
    """Return the command of the device plugin. ``hook``: the program that the CDI specification runs."""
    return [
        str(plugin),
        "--device-list-strategy=cdi-cri",
        "--device-discovery-strategy=nvml",
        "--driver-root-ctr-path=/",  # it runs on the machine itself
        f"--nvidia-cdi-hook-path={hook}",
    ]


def start() -> None:
    """Start the device plugin, label the node and wait until the scheduler sees the GPUs."""
    _register_libraries(driver_folder(os.environ.get("LD_LIBRARY_PATH", "")))
    _SPECIFICATION.parent.mkdir(parents=True, exist_ok=True)
    assert PACK is not None
    command = plugin_command(binary("nvidia-device-plugin"), PACK / "tools" / "nvidia-cdi-hook")
    processes.start("nvidia-device-plugin", command)
    kubectl("label", "--overwrite", "node", NODE, LABEL)
    log = processes.log_file("nvidia-device-plugin")
    wait_for("the device plugin", lambda: allocatable() > 0, 60, log)


def allocatable() -> int:
    """Return how many GPUs the node offers to pods."""
    path = "{.status.allocatable.nvidia\\.com/gpu}"
    return int(kubectl("get", "node", NODE, "-o", f"jsonpath={path}").strip() or 0)


def _register_libraries(folder: Path) -> None:
    """Add the driver's folder to the loader's cache, where the plugin looks for what it puts into pods."""
    _LOADER.parent.mkdir(parents=True, exist_ok=True)
    _LOADER.write_text(f"{folder}\n")
    run(["ldconfig"], step="registering the driver's libraries", remedy=_REMEDY)
    wanted = str(folder / "libcuda.so.1")
    if wanted not in run(["ldconfig", "-p"], step="reading the loader's cache", remedy=_REMEDY):
        raise StageError(f"ldconfig did not register {wanted}. {_REMEDY}")


def down() -> None:
    """Remove what ``start`` and the device plugin left outside the devcluster's folders."""
    if not _LOADER.exists():  # another cluster's plugin may have written the same files
        return
    processes.stop("nvidia-device-plugin")
    _SPECIFICATION.unlink(missing_ok=True)
    (_SOCKETS / "nvidia-gpu.sock").unlink(missing_ok=True)
    _LOADER.unlink()
    subprocess.run(["ldconfig"], check=False)
