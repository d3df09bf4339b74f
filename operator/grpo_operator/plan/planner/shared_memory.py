"""Size of /dev/shm that a pod template sets beside ``scheduling.sharedMemory`` (pure)."""

from typing import Any

from grpo_operator.api.v1alpha1.scheduling import PodOverlay

_MOUNT, _VOLUME = "/dev/shm", "shm"  # as grpo_operator.render.placement renders them
_RANKS = "ray-worker"


def overlaid_sizes(overlay: PodOverlay | None) -> dict[str, str]:
    """Return the size limit of the ranks' /dev/shm in the changes of a training pod, by field; or nothing."""
    if overlay is None:
        return {}
    name = _mounted(overlay.spec)
    for volume in _named(overlay.spec, "volumes", name):
        size = (volume.get("emptyDir") or {}).get("sizeLimit")
        if size is not None:
            return {f"spec.trainer.podTemplate.spec.volumes[{name}].emptyDir.sizeLimit": str(size)}
    return {}


def _mounted(spec: dict[str, Any]) -> str:
    """Return the name of the volume that the ranks have at /dev/shm."""
    for container in _named(spec, "containers", _RANKS):
        for mount in container.get("volumeMounts") or ():
            if mount.get("mountPath") == _MOUNT and mount.get("name"):
                return str(mount["name"])
    return _VOLUME


def _named(spec: dict[str, Any], key: str, name: str) -> list[dict[str, Any]]:
    return [item for item in spec.get(key) or () if item.get("name") == name]
