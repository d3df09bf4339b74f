"""Mounts of a job's folder in its store, and the container that makes the folder (pure).

No pod mounts an object store: with one, the folder is on a disk of the pod, for logs and traces.

Kubelet would make the folder of a missing subPath itself, as root, where the pod's user cannot write.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grpo_operator.api.base import Resources
from grpo_operator.api.names import GOOGLE_KEY, GOOGLE_KEY_VARIABLE, LOGS, STORE_MOUNT
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.render.pod_template import PodParts

FETCHED = "volumes"  # folder of the store for the files that jobs fetch, which they share
# Less than any container that starts after it, so it does not raise the pod's requests.
_RESOURCES = Resources(cpu="10m", memory="64Mi")
# Entries of a Secret with credentials for S3, and the variables in which all clients of it read them.
_S3_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
# Also in file:///store/x, and not in s3://bucket/store/x.
_IN_STORE = re.compile(rf"(?<![\w.-]){STORE_MOUNT}(/|$)")
# Folders of a hostPath belong to root. The namespace must allow such volumes, and root, anyway.
_OWNER = {"runAsUser": 0, "runAsGroup": 0, "runAsNonRoot": False} | {
    "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "DAC_OVERRIDE", "FOWNER"]}
}


@dataclass(frozen=True, slots=True)
class JobStore:
    """Store of one job. ``folder``: of the job, as ``names.job_store`` returns it."""

    parts: PodParts
    spec: GRPOJobSpec
    folder: str

    @property
    def volume(self) -> dict[str, Any]:
        """Return the volume of the whole store; beside an object store, each pod has a disk of its own."""
        store = self.spec.checkpoint.store
        if store.uri:
            return {"name": "store", "emptyDir": {}}
        if store.pvc:
            return {"name": "store", "persistentVolumeClaim": {"claimName": store.pvc}}
        return {"name": "store", "hostPath": {"path": store.path, "type": "DirectoryOrCreate"}}

    def mounts(self, read_only: bool = False) -> list[dict[str, Any]]:
        """Return the mounts of containers that run a user's code, who can write to the job's folder only.

        The rest of the store is there to read if the spec names a path in it, such as a model's. A job that
        starts from another one's checkpoint writes in one mount of all: hard links do not cross mounts.
        """
        checkpoint = self.spec.checkpoint
        if checkpoint.resume_from is not None and checkpoint.store.uri is None and not read_only:
            return [{"name": "store", "mountPath": STORE_MOUNT}]
        own = mount(self.folder, read_only)
        return [{"name": "store", "mountPath": STORE_MOUNT, "readOnly": True}, own] if self._named else [own]

    @property
    def logs(self) -> str:
        """Return the folder for log files, the only one of the job's in which agents may write."""
        return f"{self.folder}/{LOGS}"

    def share_logs(self, agent: dict[str, Any]) -> None:
        """Let an agent write to ``logs``."""
        agent["volumeMounts"].append(mount(self.logs, read_only=False))

    def prepare(self, image: str) -> dict[str, Any]:
        """Return the first init container of a pod with the store, which makes the folders to mount."""
        commands = [f"mkdir -p {shlex.quote(self.logs)}"]
        if self._root_is_roots:
            user, group = self.parts.security.user, self.parts.security.group
            # A folder itself comes last, so a pod that finds it changed finds all of it changed. An older
            # release made no folder for logs.
            commands += [
                f'{{ [ "$(stat -c %u {folder})" = {user} ] || chown -R {user}:{group} {folder}; }}'
                for folder in map(shlex.quote, (self.folder, self.logs))
            ]
        if _fetches(self.spec):
            shared = f"{STORE_MOUNT}/{FETCHED}"
            # As /tmp: jobs of other users fetch into it too.
            commands += [f"mkdir -p {shared}", f"{{ chmod 1777 {shared} 2>/dev/null || [ -w {shared} ]; }}"]
        name, command = "prepare-store", " && ".join(commands)
        container = self.parts.container(name, image, _RESOURCES, command=command)
        return self.share_root(container)

    def share_root(self, container: dict[str, Any]) -> dict[str, Any]:
        """Return a container with the whole store, in which it may make, rename and remove folders."""
        container["volumeMounts"].append({"name": "store", "mountPath": STORE_MOUNT})
        return container | ({"securityContext": _OWNER} if self._root_is_roots else {})

    @property
    def _root_is_roots(self) -> bool:
        """Return whether the store's own folder belongs to root, and not to the pods' user."""
        return bool(self.spec.checkpoint.store.path) and self.parts.security.spec.run_as_user is None

    def credentials(self) -> list[dict[str, Any]]:
        """Return the env of containers that use an object store. They report a Secret that lacks a key."""
        store = self.spec.checkpoint.store
        if store.secret is None:
            return []
        if (store.uri or "").startswith("gs://"):
            return [_from_secret(GOOGLE_KEY_VARIABLE, store.secret, GOOGLE_KEY)]
        return [_from_secret(name, store.secret, name) for name in _S3_KEYS]

    @property
    def _named(self) -> bool:
        spec = self.spec.wire()
        del spec["checkpoint"]["store"]  # where the store is, not a path in it
        return any(_IN_STORE.search(text) for text in _texts(spec))


def mount(folder: str, read_only: bool) -> dict[str, Any]:
    """Return the mount of one folder of the store, at the path that it has in the whole store."""
    made = {"name": "store", "mountPath": folder, "subPath": folder.removeprefix(f"{STORE_MOUNT}/")}
    return made | ({"readOnly": True} if read_only else {})


def _from_secret(name: str, secret: str, key: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, "optional": True}}}


def _fetches(spec: GRPOJobSpec) -> bool:
    return any(volume is not None and volume.uri for volume in (spec.model.volume, spec.data.volume))


def _texts(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for value in data.values():
            yield from _texts(value)
    elif isinstance(data, list):
        for value in data:
            yield from _texts(value)
