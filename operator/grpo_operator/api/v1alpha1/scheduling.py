"""Where and how a job's pods run: queue, gang, topology, devices, and overlays of the templates."""

from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_operator.api.base import Model, Name

LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=r"^[A-Za-z0-9._/-]+$")]
EnvValue = Annotated[str, Field(max_length=1024)]
# What a GPU job needs whatever the fabric. Megatron-Core asks for the first with tensor or context
# parallelism on Hopper; SGLang sets the third for itself, and both ends of a group must agree.
NCCL_DEFAULTS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    "NCCL_CUMEM_ENABLE": "0",
}


class Toleration(Model):
    """A taint that the job's pods tolerate."""

    key: str = Field("", max_length=317, description="taint key; empty with Exists: every taint")
    operator: Literal["Exists", "Equal"] = Field("Equal", description="Exists: whatever the value")
    value: str = Field("", max_length=63, description="taint value")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field("", description="empty: all")


class RdmaSpec(Model):
    """RDMA devices of each GPU pod, as a device plugin offers them."""

    resource: LabelKey = Field("rdma/hca", description="extended resource of the device plugin")
    count: int = Field(8, ge=1, le=64, description="devices of a pod")


class PodOverlay(Model):
    """Merged into a pod template as kubectl's strategic merge would: maps by key, containers, env
    and volumes by name, volumeMounts by mountPath, other lists replaced."""

    metadata: dict[str, Any] = Field(
        default_factory=dict,
        description="labels and annotations",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )
    spec: dict[str, Any] = Field(
        default_factory=dict,
        description="fields of a PodSpec",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )


class UnhealthyNodes(Model):
    """Signs of a sick node. A pod leaves a node that shows one and is cordoned."""

    conditions: list[LabelKey] = Field(
        default_factory=list, max_length=32, description="types of node conditions, true when sick"
    )
    taints: list[LabelKey] = Field(default_factory=list, max_length=32, description="keys of node taints")


class SchedulingSpec(Model):
    """Pod scheduling common to all pools."""

    queue_name: Name | None = Field(None, description="Kueue LocalQueue: the job waits and starts whole")
    gang_scheduler: Literal["none", "volcano", "yunikorn", "kai", "scheduler-plugins"] = Field(
        "none", description="what KubeRay was started with (batchScheduler.name): pods start all or none"
    )
    gang_queue: Name | None = Field(None, description="queue of that scheduler (volcano, yunikorn, kai)")
    topology_key: LabelKey | None = Field(
        None, description="node label of a network leaf: the pods of one engine share its value"
    )
    tolerations: list[Toleration] = Field(
        default_factory=list, max_length=16, description="taints that every pod tolerates"
    )
    priority_class_name: Name | None = Field(None, description="PriorityClass of every pod")
    runtime_class_name: Name | None = Field(None, description="RuntimeClass of GPU pods, such as nvidia")
    image_pull_secrets: list[Name] = Field(
        default_factory=list, max_length=8, description="Secrets of the namespace, for private registries"
    )
    rdma: RdmaSpec | None = None
    shared_memory: str = Field(
        "64Gi", pattern=r"^[0-9]+(Mi|Gi|Ti)$", max_length=16, description="/dev/shm of a GPU pod, bytes"
    )
    nccl_env: dict[str, EnvValue] = Field(
        default_factory=lambda: dict(NCCL_DEFAULTS), max_length=64, description="environment of GPU pods"
    )
    eviction_seconds: int = Field(
        30, ge=0, le=86400, description="seconds on an unreachable node before a pod is replaced"
    )
    unhealthy_nodes: UnhealthyNodes = Field(default_factory=UnhealthyNodes)
    network_policy: bool = Field(True, description="let only the job and the operator reach the pods")


class WithOverlay(Model):
    """Mixed into every pool."""

    pod_template: PodOverlay | None = Field(None, description="overlay of this pool's pod template")
    eviction_seconds: int | None = Field(
        None, ge=0, le=86400, description="of this pool; default: scheduling.evictionSeconds"
    )
