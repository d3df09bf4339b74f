"""``mode: colocated``: trainers and engines take turns on the same GPUs, and what that asks of a job."""

from typing import TYPE_CHECKING

from grpo_operator.api.base import Device

if TYPE_CHECKING:
    from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec

_STANDING = "mode colocated needs rollout.template: a standing pool has GPUs of its own"
_ENGINE = (
    "mode colocated: rollout.template.engine must have the trainer's device, one node, and on cuda"
    " gpusPerNode like trainer.gpusPerNode: it takes turns with the ranks of one pod"
)
_REPLICAS = (
    "mode colocated: rollout.template.replicas must not exceed trainer.nodes, one engine beside each pod"
)
_OFFLOAD = (
    "mode colocated on cuda needs trainer.offload.parameters, gradients and optimizer: what stays on the GPUs"
    " is missing to the engines"
)
_AHEAD = "mode colocated excludes staleness.maxVersionLag: nobody generates while others train"
_NCCL = (
    "mode colocated excludes weightSync.transport nccl, which takes one process for each GPU: leave it out"
)
_IPC = (
    "weightSync.transport cuda-ipc needs mode colocated on cuda and trainer.nodes 1: it reaches no other host"
)

_COLOCATED = (
    ("has(self.rollout.template)", _STANDING),
    (
        "!has(self.rollout.template) || (self.rollout.template.engine.device == self.trainer.device"
        " && self.rollout.template.engine.nodesPerEngine == 1 && (self.trainer.device == 'cpu'"
        " || self.rollout.template.engine.gpusPerNode == self.trainer.gpusPerNode))",
        _ENGINE,
    ),
    ("!has(self.rollout.template) || self.rollout.template.replicas <= self.trainer.nodes", _REPLICAS),
    (
        "self.trainer.device == 'cpu' || (self.trainer.offload.parameters"
        " && self.trainer.offload.gradients && self.trainer.offload.optimizer)",
        _OFFLOAD,
    ),
    ("self.staleness.maxVersionLag == 0", _AHEAD),
    ("self.weightSync.transport != 'nccl'", _NCCL),
)
CEL = (
    *((f"self.mode != 'colocated' || {rule}", message) for rule, message in _COLOCATED),
    (
        "self.weightSync.transport != 'cuda-ipc'"
        " || (self.mode == 'colocated' && self.trainer.device == 'cuda' && self.trainer.nodes == 1)",
        _IPC,
    ),
)


def check(spec: "GRPOJobSpec") -> None:
    """The same as CEL says. Raises ValueError."""
    if spec.weight_sync.transport == "cuda-ipc" and not (spec.shares_gpus and spec.trainer.nodes == 1):
        raise ValueError(_IPC)
    if spec.mode != "colocated":
        return
    template, trainer = spec.rollout.template, spec.trainer
    if template is None:
        raise ValueError(_STANDING)
    cuda, engine, offload = trainer.device is Device.CUDA, template.engine, trainer.offload
    alike = engine.gpus_per_node == trainer.gpus_per_node or not cuda
    if engine.device != trainer.device or engine.nodes_per_engine != 1 or not alike:
        raise ValueError(_ENGINE)
    if template.replicas > trainer.nodes:
        raise ValueError(_REPLICAS)
    if cuda and not (offload.parameters and offload.gradients and offload.optimizer):
        raise ValueError(_OFFLOAD)
    if spec.staleness.max_version_lag:
        raise ValueError(_AHEAD)
    if spec.weight_sync.transport == "nccl":
        raise ValueError(_NCCL)
