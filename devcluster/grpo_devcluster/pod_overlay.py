"""Overlay of all pods of jobs: the machine's Python environment and, on machines with GPUs, its CUDA."""

from pathlib import Path
from typing import Any

from grpo_devcluster import nvidia
from grpo_devcluster.images import environment, environment_mounts
from grpo_devcluster.packed import SITE
from grpo_devcluster.paths import CACHE, PACK

TOOLKIT = Path("/usr/local/cuda")
PACKAGES = Path("/opt/grpo-packages")  # on PYTHONPATH in the images of trainers and engines
KERNELS = CACHE / "kernels"
_ROOT_HOME = Path("/root")
_CACHES = {  # of what compiles kernels when they are first used
    "TRITON_CACHE_DIR": "triton",
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
    "TVM_FFI_CACHE_DIR": "tvm-ffi",
    "CUDA_CACHE_PATH": "cuda",
}


def pod_overlay() -> dict[str, Any]:
    """Return the chart's value ``podOverlay``."""
    mounts = {path: path for path in environment_mounts()}
    if PACK is not None and (PACK / SITE).is_dir():
        mounts[PACK / SITE] = PACKAGES
    volumes: list[dict[str, Any]] = [
        {"name": f"python-{i}", "hostPath": {"path": str(path), "type": "Directory"}}
        for i, path in enumerate(mounts)
    ]
    volume_mounts: list[dict[str, Any]] = [
        {"name": f"python-{i}", "mountPath": str(path), "readOnly": True}
        for i, path in enumerate(mounts.values())
    ]
    # Images close /root to all users but root. In a volume there, anyone may enter what is mounted below it.
    if any(_ROOT_HOME in path.parents for path in (*mounts.values(), KERNELS)):
        volumes.insert(0, {"name": "root-home", "emptyDir": {}})
        volume_mounts.insert(0, {"name": "root-home", "mountPath": str(_ROOT_HOME)})
    path = f"{environment() / 'bin'}:{PACKAGES / 'bin'}:/usr/local/bin:/usr/bin:/bin"
    variables = {"PATH": path}
    if nvidia.present():
        variables |= cuda()
        # An engine compiles kernels for a minute, the trainer in its first step for another one.
        variables |= {name: str(KERNELS / folder) for name, folder in _CACHES.items()}
        for folder in _CACHES.values():
            _open_to_all(KERNELS / folder)
        volumes.append({"name": "kernels", "hostPath": {"path": str(KERNELS), "type": "DirectoryOrCreate"}})
        volume_mounts.append({"name": "kernels", "mountPath": str(KERNELS)})
    env = [{"name": name, "value": value} for name, value in variables.items()]
    return {"volumes": volumes, "volumeMounts": volume_mounts, "env": env}


def _open_to_all(folder: Path) -> None:
    """Make a folder in which pods of any user may write, as in /tmp."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o1777)


def cuda() -> dict[str, str]:
    """Return the variables that lead to CUDA's libraries and toolkit, as in images of GPUs."""
    folders = sorted(environment().glob("lib/python*/site-packages/nvidia/*/lib"))
    found = {"LD_LIBRARY_PATH": ":".join(map(str, folders))}
    return found | ({"CUDA_HOME": str(TOOLKIT.resolve())} if TOOLKIT.is_dir() else {})
