"""Mounts of ``model.volume`` and ``data.volume``, and the container that fetches them (pure)."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from grpo_operator.api.base import Resources
from grpo_operator.api.names import CONTROLLER_PORT, STORE_MOUNT
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.model import ModelSpec
from grpo_operator.api.v1alpha1.volumes import COMPLETE, FETCHED_FILES, VolumeSpec
from grpo_operator.render.pod_template import PYTHON, PodParts, stoppable
from grpo_operator.render.store import FETCHED, mount

# It only sleeps. Less than any container that starts after it, so it does not raise the pod's requests.
_WAIT_RESOURCES = Resources(cpu="10m", memory="64Mi")


@dataclass(frozen=True, slots=True)
class Files:
    """A VolumeSpec rendered into pods. ``kind``: model or data."""

    kind: str
    spec: VolumeSpec

    @property
    def fetched(self) -> str | None:
        """Return the directory in the store for a URI's files, or None without a URI.

        All jobs that fetch the same files share it.
        """
        if self.spec.uri is None:
            return None
        source = json.dumps([self.spec.uri, self.spec.endpoint, self.spec.digest])
        return f"{FETCHED}/{hashlib.sha256(source.encode()).hexdigest()[:16]}"

    def mount_into(self, pod: dict[str, Any], container: dict[str, Any]) -> None:
        """Mount the files read-only into a container of a pod that has the store volume."""
        name = "store" if self.fetched else self._volume(pod["spec"].setdefault("volumes", []))
        mount = {"name": name, "mountPath": self.spec.mount_path, "readOnly": True}
        if self.fetched:
            mount["subPath"] = f"{self.fetched}/{FETCHED_FILES}"
        container["volumeMounts"].append(mount)

    def wait(self, parts: PodParts, image: str) -> dict[str, Any] | None:
        """Return an init container that waits until the files are fetched; None if nothing is fetched."""
        if self.fetched is None:
            return None
        # Process 1 of a container ignores SIGTERM without a handler, and bash runs handlers only between
        # commands or during wait.
        done = f"[ -f {STORE_MOUNT}/{self.fetched}/{COMPLETE} ]"
        command = f"trap 'exit 0' TERM; until {done}; do sleep 2 & wait $!; done"
        container = parts.container(f"wait-for-{self.kind}", image, _WAIT_RESOURCES, command=command)
        container["volumeMounts"].append(mount(f"{STORE_MOUNT}/{FETCHED}", read_only=True))
        return container

    def credential(self) -> list[dict[str, Any]]:
        """Return the env of the fetch. The Secret is optional here: the fetch reports a missing one."""
        credential = self.spec.credential
        if credential is None:
            return []
        key = {"name": credential.secret, "key": credential.key, "optional": True}
        return [{"name": f"GRPO_{self.kind.upper()}_CREDENTIAL", "valueFrom": {"secretKeyRef": key}}]

    def _volume(self, volumes: list[dict[str, Any]]) -> str:
        """Return the name of the pod's volume for these files; add the volume if needed."""
        claim = self.spec.pvc
        # Two volumes of the same claim in one pod can hang in kubelet, so they share one.
        for volume in volumes if claim else ():
            if volume.get("persistentVolumeClaim", {}).get("claimName") == claim:
                return str(volume["name"])
        # A hostPath without a type: the controller reports a missing directory, where kubelet would only
        # delay the pod.
        source: dict[str, Any] = {"hostPath": {"path": self.spec.path}}
        if claim:
            source = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        volumes.append({"name": f"{self.kind}-files"} | source)
        return f"{self.kind}-files"


def model_files(model: ModelSpec) -> Files | None:
    """Return the model's volume, if it has one."""
    return Files("model", model.volume) if model.volume else None


def job_files(spec: GRPOJobSpec) -> list[Files]:
    """Return the model and data files that the controller reads."""
    data = Files("data", spec.data.volume) if spec.data.volume else None
    return [files for files in (model_files(spec.model), data) if files]


def fetch(parts: PodParts, image: str, resources: Resources, volumes: list[Files]) -> dict[str, Any] | None:
    """Return the controller pod's init container that fetches every URI; None when there is none."""
    fetched = [files for files in volumes if files.fetched]
    if not fetched:
        return None
    directories = " ".join(f"{files.kind}={STORE_MOUNT}/{files.fetched}" for files in fetched)
    command = stoppable(f"{PYTHON} -m grpo_worker.volumes.fetch {directories}")
    container = parts.container("fetch", image, resources, command=command)
    parts.share_tls(container)
    container["ports"] = [{"name": "fetch", "containerPort": CONTROLLER_PORT}]
    container["env"] += [variable for files in fetched for variable in files.credential()]
    shared = mount(f"{STORE_MOUNT}/{FETCHED}", read_only=False)
    container["volumeMounts"] += [{"name": "job", "mountPath": "/etc/grpo", "readOnly": True}, shared]
    return container
