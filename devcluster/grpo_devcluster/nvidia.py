"""NVIDIA's device plugin and container runtime, which give pods GPUs.

The plugin lets pods ask for ``nvidia.com/gpu`` and see no other GPUs than their own: it writes a CDI
specification (device nodes, the driver's libraries, hooks), and containerd applies the entries that kubelet
names for a pod. The runtime, of the RuntimeClass ``nvidia``, gives all GPUs to containers that request none
and have NVIDIA_VISIBLE_DEVICES=all: engines that share the GPUs of a training pod. Pods need no privileges.
"""

import json
import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

from grpo_devcluster import processes
from grpo_devcluster.addons import kubectl
from grpo_devcluster.gobuild import GPUS, binary, link_tools
from grpo_devcluster.paths import CACHE, PACK, RUN
from grpo_devcluster.settings import NODE
from grpo_devcluster.stages import StageError, run, wait_for

RESOURCE = "nvidia.com/gpu"
LABEL = "nvidia.com/gpu.present=true"
LIBRARY = "libnvidia-ml.so.1"
RUNTIME = "nvidia"  # name of the RuntimeClass and of containerd's runtime
_CONTROL = Path("/dev/nvidiactl")
_LOADER = Path("/etc/ld.so.conf.d/grpo-devcluster-nvidia.conf")
SPECIFICATION = Path("/var/run/cdi/k8s.device-plugin.nvidia.com-gpu.json")  # of the GPUs that pods ask for
_SOCKETS = Path("/var/lib/kubelet/device-plugins")  # the same for every kubelet, whatever its root is
_RUNTIME_CONFIG = RUN / "nvidia-container-runtime.toml"
# NVIDIA's programs recognize each other by their plain names.
_TOOLS = PACK / "tools" if PACK else CACHE / "gpu-tools"
_REMEDY = "Is /etc writable, and does the driver's folder have libcuda.so.1?"
_PLACES = (Path("/usr/local/nvidia/lib64"), Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/lib64"))


def present() -> bool:
    """Return whether this machine has NVIDIA GPUs."""
    return _CONTROL.exists()


def names() -> str:
    """Return number and name of this machine's GPUs: ``2 x NVIDIA H100 80GB HBM3``."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = run(command, step="reading the GPUs' names", remedy="Is nvidia-smi on PATH?").splitlines()
    return f"{len(found)} x {found[0].strip()}"


def use_tools() -> None:
    """Let daemons find containerd and its shim as built for GPUs; without GPUs do nothing.

    With a pack, they are on PATH with its other tools.
    """
    if present() and PACK is None:
        folder = link_tools(GPUS, _TOOLS)
        os.environ["PATH"] = ":".join(dict.fromkeys([str(folder), *os.environ["PATH"].split(":")]))


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


def containerd_runtimes() -> str:
    """Return the runtimes of containerd's configuration: runc, and NVIDIA's around it."""
    table = 'plugins."io.containerd.grpc.v1.cri".containerd'
    return f"""\
[{table}]
  default_runtime_name = "runc"
[{table}.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[{table}.runtimes.{RUNTIME}]
  runtime_type = "io.containerd.runc.v2"
[{table}.runtimes.{RUNTIME}.options]
  BinaryName = "{binary("nvidia-container-runtime")}"
"""


def runtime_config() -> str:
    """Return the configuration of NVIDIA's runtime, which makes a CDI specification for each container."""
    return f"""\
[nvidia-ctk]
path = "{_TOOLS / "nvidia-cdi-hook"}"
[nvidia-container-runtime]
mode = "jit-cdi"
runtimes = ["runc"]
debug = "{processes.log_file("nvidia-container-runtime")}"
"""


def containerd_environment() -> dict[str, str]:
    """Register the driver's libraries, and return the variables of containerd, which starts the runtime."""
    _register_libraries(driver_folder(os.environ.get("LD_LIBRARY_PATH", "")))
    _RUNTIME_CONFIG.write_text(runtime_config())
    return {"NVIDIA_CTK_CONFIG_FILE_PATH": str(_RUNTIME_CONFIG)}


def start() -> None:
    """Start the device plugin, label the node and wait until the scheduler sees the GPUs."""
    SPECIFICATION.parent.mkdir(parents=True, exist_ok=True)
    command = plugin_command(binary("nvidia-device-plugin"), _TOOLS / "nvidia-cdi-hook")
    processes.start("nvidia-device-plugin", command)
    kubectl("label", "--overwrite", "node", NODE, LABEL)
    kubectl("apply", "-f", "-", stdin=json.dumps(runtime_class()))
    log = processes.log_file("nvidia-device-plugin")
    wait_for("the device plugin", lambda: allocatable() > 0, 60, log)


def runtime_class() -> dict[str, object]:
    """Return the RuntimeClass of NVIDIA's runtime, named as by NVIDIA's GPU operator."""
    return {
        "apiVersion": "node.k8s.io/v1",
        "kind": "RuntimeClass",
        "metadata": {"name": RUNTIME},
        "handler": RUNTIME,
    }


def allocatable() -> int:
    """Return how many GPUs the node offers to pods."""
    path = "{.status.allocatable.nvidia\\.com/gpu}"
    return int(kubectl("get", "node", NODE, "-o", f"jsonpath={path}").strip() or 0)


def _register_libraries(folder: Path) -> None:
    """Add the driver's folder to the loader's cache, where NVIDIA's tools look for its libraries."""
    _LOADER.parent.mkdir(parents=True, exist_ok=True)
    _LOADER.write_text(f"{folder}\n")
    run(["ldconfig"], step="registering the driver's libraries", remedy=_REMEDY)
    wanted = str(folder / "libcuda.so.1")
    if wanted not in run(["ldconfig", "-p"], step="reading the loader's cache", remedy=_REMEDY):
        raise StageError(f"ldconfig did not register {wanted}. {_REMEDY}")


def down() -> None:
    """Remove what was left outside the devcluster's folders."""
    if not _LOADER.exists():  # another cluster's plugin may have written the same files
        return
    processes.stop("nvidia-device-plugin")
    SPECIFICATION.unlink(missing_ok=True)
    (_SOCKETS / "nvidia-gpu.sock").unlink(missing_ok=True)
    _LOADER.unlink()
    subprocess.run(["ldconfig"], check=False)
