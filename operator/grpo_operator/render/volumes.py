"""Mounts of the directories that ``model.volume`` and ``data.volume`` name (pure)."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from grpo_operator.api.base import Resources
from grpo_operator.api.grpojob import GRPOJobSpec
from grpo_operator.api.model import ModelSpec
from grpo_operator.api.volumes import VolumeSpec
from grpo_operator.plan.names import CONTROLLER_PORT
from grpo_operator.render.pods import PYTHON, PodParts

STORE_MOUNT = "/store"
COMPLETE = "COMPLETE"  # the fetch writes it last
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
        name = "store" if self.fetched else f"{self.kind}-files"
        mount = {"name": name, "mountPath": self.spec.mount_path, "readOnly": True}
        if self.fetched:
            mount["subPath"] = f"{self.fetched}/files"
        else:
            pod["spec"].setdefault("volumes", []).append({"name": name} | self._volume())
        container["volumeMounts"].append(mount)

    def wait(self, parts: PodParts, image: str) -> dict[str, Any] | None:
        """Init container that ends when the files are fetched; None for what needs no fetch."""
        if self.fetched is None:
            return None
        command = f"until [ -f {STORE_MOUNT}/{self.fetched}/{COMPLETE} ]; do sleep 2; done"
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

    def _volume(self) -> dict[str, Any]:
        if self.spec.pvc:
            return {"persistentVolumeClaim": {"claimName": self.spec.pvc, "readOnly": True}}
        # Without a type: the controller says at once what is missing, where kubelet would hold up the pod.
        return {"hostPath": {"path": self.spec.path}}


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
    command = f"exec {PYTHON} -m grpo_worker.data.fetch {places}"
    container = parts.container("fetch", image, resources, command=command)
    container["ports"] = [{"name": "fetch", "containerPort": CONTROLLER_PORT}]
    container["env"] += [variable for files in fetched for variable in files.credential()]
    container["volumeMounts"] += [{"name": "job", "mountPath": "/etc/grpo", "readOnly": True}, dict(_STORE)]
    return container
