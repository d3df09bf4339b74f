"""Typed models of the RayCluster v1 fields that this operator writes and reads.

``kuberay-client`` is not on PyPI (ray-project/kuberay#3915), so this package covers the fields that are
needed. Field names follow KubeRay's ``ray.io/v1`` (1.5 and 1.6).
"""

import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

API_VERSION = "ray.io/v1"
_POD = re.compile(r'pods "[^"]*" is')


class _Model(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class HeadGroup(_Model):
    """spec.headGroupSpec. ``template`` is a PodTemplateSpec."""

    ray_start_params: dict[str, str]
    template: dict[str, Any]


class WorkerGroup(_Model):
    """One entry of spec.workerGroupSpecs. KubeRay creates and deletes the hosts of a replica together."""

    group_name: str
    replicas: int
    min_replicas: int
    max_replicas: int
    num_of_hosts: int = 1
    scale_strategy: dict[str, list[str]] | None = None
    ray_start_params: dict[str, str]
    template: dict[str, Any]


class RayClusterSpec(_Model):
    """Spec of a RayCluster."""

    ray_version: str
    suspend: bool | None = False  # None: left to Kueue, which sets it
    auth_options: dict[str, str] | None = None  # since KubeRay 1.5.1
    upgrade_strategy: dict[str, str] | None = None  # since KubeRay 1.6
    gcs_fault_tolerance_options: dict[str, Any] | None = None  # since KubeRay 1.3
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup] = Field(max_length=17)  # Kueue: 18 pod sets with the head


class RayCluster(_Model):
    """Manifest of a RayCluster."""

    metadata: dict[str, Any]
    spec: RayClusterSpec

    def delete_workers(self, pods: Mapping[str, list[str]]) -> None:
        """Name the pods that KubeRay is to delete when it makes a group smaller, by group."""
        for group in self.spec.worker_group_specs:
            if group.group_name in pods:
                group.scale_strategy = {"workersToDelete": pods[group.group_name]}

    def wire(self) -> dict[str, Any]:
        """Return the manifest as JSON-compatible data."""
        spec = self.spec.model_dump(by_alias=True, exclude_none=True)
        return {
            "apiVersion": API_VERSION,
            "kind": "RayCluster",
            "metadata": self.metadata,
            "spec": spec,
        }


class RayClusterStatus(_Model):
    """Observed status. The condition ``RayClusterProvisioned`` is never reset, so it is not used."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore")
    state: str = ""
    reason: str = ""
    observed_generation: int = 0
    ready_worker_replicas: int = 0
    desired_worker_replicas: int = 0
    conditions: list[dict[str, Any]] = Field(default_factory=list)

    def condition(self, kind: str) -> bool:
        """Return whether the condition of this type is true."""
        return any(c["type"] == kind and c["status"] == "True" for c in self.conditions)

    @property
    def refusal(self) -> str:
        """Return why KubeRay can create, or delete, no pods; "" if it can.

        The name of a pod is left out: KubeRay makes another one with each attempt.
        """
        messages = (c["message"] for c in self.conditions if c["type"] == "ReplicaFailure")
        refused = next(messages, "") if self.condition("ReplicaFailure") else ""
        return _POD.sub("a pod is", ": ".join(refused.split("\n")))

    @property
    def suspended(self) -> bool:
        """Return whether all pods have been deleted because of spec.suspend."""
        return self.condition("RayClusterSuspended") or self.state == "suspended"
