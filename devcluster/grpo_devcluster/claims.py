"""Folders of this machine as claims: a namespace that enforces pod security admits no hostPath in pods."""

from pathlib import Path
from typing import Any

_SIZE = {"storage": "100Ti"}


def claim(name: str, namespace: str, path: Path) -> list[dict[str, Any]]:
    """Return a PersistentVolume of a folder and the claim ``name`` bound to it."""
    whole = f"{namespace}-{name}"  # volumes have no namespace
    shared = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    source = {
        "capacity": _SIZE,
        "hostPath": {"path": str(path)},
        "claimRef": {"namespace": namespace, "name": name},
        "persistentVolumeReclaimPolicy": "Retain",
    }
    wanted = {"resources": {"requests": _SIZE}, "volumeName": whole}
    metadata = {"name": name, "namespace": namespace}
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": whole},
            "spec": shared | source,
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": metadata,
            "spec": shared | wanted,
        },
    ]


def with_claims(overlay: dict[str, Any], namespace: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a ``podOverlay`` with claims in place of folders, and the claims' objects for a namespace."""
    read = {mount["name"] for mount in overlay["volumeMounts"] if mount.get("readOnly")}
    volumes: list[dict[str, Any]] = []
    objects: list[dict[str, Any]] = []
    for volume in overlay["volumes"]:
        if "hostPath" in volume:
            name = volume["name"]
            objects += claim(name, namespace, Path(volume["hostPath"]["path"]))
            source = {"claimName": name, "readOnly": name in read}
            volumes.append({"name": name, "persistentVolumeClaim": source})
        else:
            volumes.append(volume)
    return overlay | {"volumes": volumes}, objects
