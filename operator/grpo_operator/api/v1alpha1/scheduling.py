"""Scheduling of pods: queue, gang, topology, devices, and overlays of pod templates."""

from typing import Annotated, Any, Literal

from pydantic import Field

from grpo_operator.api.base import Model, Name
from grpo_operator.api.rules import Rule, UpdateRule
from grpo_operator.api.v1alpha1.egress import EgressSpec
from grpo_operator.api.v1alpha1.pod_security import SecurityContextSpec
from grpo_operator.api.v1alpha1.rdma import RdmaSpec
from grpo_operator.api.v1alpha1.tls import TlsSpec

LabelKey = Annotated[str, Field(min_length=1, max_length=317, pattern=r"^[A-Za-z0-9._/-]+$")]
EnvValue = Annotated[str, Field(max_length=1024)]
# Variables that GPU jobs need on every network. Megatron-Core requires CUDA_DEVICE_MAX_CONNECTIONS=1 with
# tensor or context parallelism on Hopper. SGLang sets NCCL_CUMEM_ENABLE=0 in its own processes, and all
# members of a process group must agree on it. PyTorch's monitor ends a process eight minutes after any of its
# groups has reported an error, also a group with an engine that has died; the job has watches of its own.
NCCL_DEFAULTS = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


class Toleration(Model):
    """Toleration of a node taint."""

    key: str = Field("", max_length=317, description="taint key; empty with operator Exists: every taint")
    operator: Literal["Exists", "Equal"] = Field(
        "Equal", description="Exists: any value. Equal: only the given value"
    )
    value: str = Field("", max_length=63, description="taint value")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = Field(
        "", description="taint effect; empty: all effects"
    )


class PodOverlay(Model):
    """Changes to a pod template, merged as in kubectl's strategic merge patch.

    Maps are merged by key; containers, env and volumes by name; volumeMounts by mountPath. Other lists
    are replaced.
    """

    metadata: dict[str, Any] = Field(
        default_factory=dict,
        description="labels and annotations of the pod",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )
    spec: dict[str, Any] = Field(
        default_factory=dict,
        description="fields of the PodSpec",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )


class UnhealthyNodes(Model):
    """Signs of an unhealthy node. Pods are moved off a cordoned node that shows one of them."""

    conditions: list[LabelKey] = Field(
        default_factory=list,
        max_length=32,
        description="types of node conditions that are True on an unhealthy node",
    )
    taints: list[LabelKey] = Field(
        default_factory=list,
        max_length=32,
        description="keys of the taints of an unhealthy node",
    )
    max_nodes_percent: int = Field(
        10,
        ge=1,
        le=100,
        description="largest share of the nodes of this job or pool that pods leave at a time, in percent, "
        "but at least one node; the next pods leave when the replacements of the ones before run",
    )


_RULES: tuple[Rule["SchedulingSpec"], ...] = (
    Rule(
        "!has(self.rdma) || !self.rdma.hostNetwork || !self.networkPolicy",
        "rdma.hostNetwork needs networkPolicy false: a policy selects pods, but connections from a host's "
        "network come from the node, and pods that use it are not selected",
        lambda scheduling: (
            scheduling.rdma is None or not scheduling.rdma.host_network or not scheduling.network_policy
        ),
    ),
    Rule(
        "!has(self.egress) || self.networkPolicy",
        "egress needs networkPolicy true: it is a part of that policy",
        lambda scheduling: scheduling.egress is None or scheduling.network_policy,
    ),
)
_UPDATE_RULES = (
    UpdateRule(
        "has(oldSelf.tls) == has(self.tls)",
        "scheduling.tls is fixed once the object exists, but for caBundle: create a new one",
    ),
)


class SchedulingSpec(Model):
    """Scheduling of the pods of all pools, and their networks."""

    rules = _RULES
    update_rules = _UPDATE_RULES
    queue_name: Name | None = Field(
        None, description="Kueue LocalQueue; the job waits there until all of its pods can start"
    )
    gang_scheduler: Literal["none", "volcano", "yunikorn", "kai", "scheduler-plugins"] = Field(
        "none",
        description="gang scheduler, as in KubeRay's batchScheduler.name: all pods start together or none",
    )
    gang_queue: Name | None = Field(None, description="queue of the gang scheduler (volcano, yunikorn, kai)")
    topology_key: LabelKey | None = Field(
        None,
        description="node label of the network leaf; all pods of an engine run on nodes with the same value",
    )
    tolerations: list[Toleration] = Field(
        default_factory=list, max_length=16, description="taints that every pod tolerates"
    )
    priority_class_name: Name | None = Field(None, description="PriorityClass of every pod")
    runtime_class_name: Name | None = Field(None, description="RuntimeClass of GPU pods, such as nvidia")
    image_pull_secrets: list[Name] = Field(
        default_factory=list,
        max_length=8,
        description="Secrets in the namespace with credentials of private registries",
    )
    rdma: RdmaSpec | None = None
    shared_memory: str | None = Field(
        None,
        pattern=r"^[0-9]+(Mi|Gi|Ti)$",
        max_length=16,
        description="size of /dev/shm in GPU pods, in bytes with a suffix: Mi, Gi or Ti, within the memory of"
        " their containers; default: what the plan needs",
    )
    nccl_env: dict[str, EnvValue] = Field(
        default_factory=dict,
        max_length=64,
        description="environment variables of GPU pods, besides the operator's own or in their place: "
        + ", ".join(f"{name}={value}" for name, value in NCCL_DEFAULTS.items()),
    )
    eviction_seconds: int = Field(
        30, ge=0, le=86400, description="seconds after which a pod on an unreachable node is replaced"
    )
    unhealthy_nodes: UnhealthyNodes = Field(default_factory=UnhealthyNodes)
    security_context: SecurityContextSpec = Field(default_factory=SecurityContextSpec)
    evict_trainers: bool = Field(
        False,
        description="true: a drain may evict one training pod at a time; the job saves its finished steps "
        "first and goes on with another pod. false: no drain evicts training pods: suspend the job first",
    )
    network_policy: bool = Field(
        True, description="allow connections to the pods only from the job and the operator"
    )
    egress: EgressSpec | None = None
    tls: TlsSpec | None = None

    @property
    def gpu_environment(self) -> dict[str, str]:
        """Environment variables of GPU pods."""
        return NCCL_DEFAULTS | self.nccl_env

    def eviction_seconds_of(self, pool: "WithOverlay") -> int:
        """Return the seconds after which pods of a pool on an unreachable node are replaced."""
        own = pool.eviction_seconds
        return self.eviction_seconds if own is None else own


class WithOverlay(Model):
    """Base of pools whose pod template can be changed."""

    pod_template: PodOverlay | None = Field(None, description="changes to the pod template of this pool")
    eviction_seconds: int | None = Field(
        None,
        ge=0,
        le=86400,
        description="seconds after which a pod of this pool on an unreachable node is replaced; default: "
        "scheduling.evictionSeconds",
    )
