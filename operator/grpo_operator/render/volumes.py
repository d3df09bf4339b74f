"""Mounts of the directories that ``model.volume`` and ``data.volume`` name (pure)."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from grpo_operator.api.base import Resources
from grpo_operator.api.names import CONTROLLER_PORT
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.model import ModelSpec
from grpo_operator.api.v1alpha1.volumes import COMPLETE, FETCHED_FILES, VolumeSpec
from grpo_operator.render.pod_template import PYTHON, PodParts

STORE_MOUNT = "/store"
# Nothing but a shell that sleeps; less than any container that starts after it, so pods ask for no more.
_WAIT_RESOURCES = Resources(cpu="10m", memory="64Mi")
_STORE = {"name": "store", "mountPath": STORE_MOUNT}


@dataclass(frozen=True, slots=True)
class Files:
    """One VolumeSpec in pods. ``kind``: model or data."""

    kind: str
    spec: VolumeSpec

    @property
    def fetched(self) -> str | None:
        """Directory of a URI's files in the store, the same for all jobs that fetch the same; else None."""
        if self.spec.uri is None:
            return None
        source = json.dumps([self.spec.uri, self.spec.endpoint, self.spec.digest])
        return f"volumes/{hashlib.sha256(source.encode()).hexdigest()[:16]}"

    def mount_into(self, pod: dict[str, Any], container: dict[str, Any]) -> None:
        """Mount the directory read-only into a container of the pod, which has the store."""
        name = "store" if self.fetched else self._volume(pod["spec"].setdefault("volumes", []))
        mount = {"name": name, "mountPath": self.spec.mount_path, "readOnly": True}
        if self.fetched:
            mount["subPath"] = f"{self.fetched}/{FETCHED_FILES}"
        container["volumeMounts"].append(mount)

    def wait(self, parts: PodParts, image: str) -> dict[str, Any] | None:
        """Init container that ends when the files are fetched; None for what needs no fetch."""
        if self.fetched is None:
            return None
        # The first process of a container ends by a signal only if it says so, and bash heeds it between two
        # commands, or in wait.
        done = f"[ -f {STORE_MOUNT}/{self.fetched}/{COMPLETE} ]"
        command = f"trap 'exit 0' TERM; until {done}; do sleep 2 & wait $!; done"
        container = parts.container(f"wait-for-{self.kind}", image, _WAIT_RESOURCES, command=command)
        container["volumeMounts"].append(_STORE | {"readOnly": True})
        return container

    def credential(self) -> list[dict[str, Any]]:
        """Environment of the fetch. The Secret may come later: the fetch says that it is missing."""
        given = self.spec.credential
        if given is None:
            return []
        key = {"name": given.secret, "key": given.key, "optional": True}
        return [{"name": f"GRPO_{self.kind.upper()}_CREDENTIAL", "valueFrom": {"secretKeyRef": key}}]

    def _volume(self, volumes: list[dict[str, Any]]) -> str:
        """Name of the pod's volume, which is added if there is none."""
        claim = self.spec.pvc
        # Kubelet may never mount the second of two volumes of one claim.
        for volume in volumes if claim else ():
            if volume.get("persistentVolumeClaim", {}).get("claimName") == claim:
                return str(volume["name"])
        # A directory without a type: the controller says at once what is missing, where kubelet would hold up
        # the pod.
        source: dict[str, Any] = {"hostPath": {"path": self.spec.path}}
        if claim:
            source = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        volumes.append({"name": f"{self.kind}-files"} | source)
        return f"{self.kind}-files"


def model_files(model: ModelSpec) -> Files | None:
    return Files("model", model.volume) if model.volume else None


def job_files(spec: GRPOJobSpec) -> list[Files]:
    """Everything that the controller reads."""
    data = Files("data", spec.data.volume) if spec.data.volume else None
    return [files for files in (model_files(spec.model), data) if files]


def fetch(parts: PodParts, image: str, resources: Resources, given: list[Files]) -> dict[str, Any] | None:
    """Init container of the controller pod that fetches every URI; None when there is none."""
    fetched = [files for files in given if files.fetched]
    if not fetched:
        return None
    places = " ".join(f"{files.kind}={STORE_MOUNT}/{files.fetched}" for files in fetched)
    command = f"exec {PYTHON} -m grpo_worker.volumes.fetch {places}"
    container = parts.container("fetch", image, resources, command=command)
    container["ports"] = [{"name": "fetch", "containerPort": CONTROLLER_PORT}]
    container["env"] += [variable for files in fetched for variable in files.credential()]
    container["volumeMounts"] += [{"name": "job", "mountPath": "/etc/grpo", "readOnly": True}, dict(_STORE)]
    return container
