"""Resolves ``spec.weightSync`` into the path of new weights into the engines (pure)."""

from typing import Literal

from grpo_operator.api.base import Device
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.model import WeightSyncSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec, RolloutTemplate
from grpo_operator.api.weight_path import Backend, WeightPath

_FIELD = "spec.weightSync.transport"
_DEVICE_OF = {"nccl": Device.CUDA, "gloo": Device.CPU}
_BACKEND_OF = {Device.CUDA: Backend.NCCL, Device.CPU: Backend.GLOO}


def job_weight_path(spec: GRPOJobSpec, pool: RolloutTemplate) -> WeightPath:
    """Return the path of a job's weights into the engines of ``pool``, its own or a shared one.

    The result is defined for every valid spec, because a job that was accepted once keeps running. See
    ``job_weight_path_problem`` for specs that are refused before.
    """
    job, agents = spec.weight_sync, _agents_settings(spec, pool)
    return WeightPath(
        direct=_direct(spec, pool),
        staged=_staged(agents),
        # The trainer leaves deltas only for agents that ask for them.
        delta=job.mode == "delta" and agents.mode == "delta",
    )


def pool_weight_path(spec: RolloutPoolSpec) -> WeightPath:
    """Return the path into the engines of a RolloutPool without a job.

    ``direct`` is None: the job that uses the pool decides on direct transfers. A pool that serves its model
    gets no weights, whatever ``spec.weightSync`` says.
    """
    if spec.serve is not None:
        return WeightPath()
    sync = spec.weight_sync
    return WeightPath(staged=_staged(sync), delta=sync.mode == "delta")


def job_weight_path_problem(spec: GRPOJobSpec, pool: RolloutTemplate) -> str:
    """Return why the devices of trainer or engines rule out ``spec.weightSync.transport``, or ""."""
    transport = spec.weight_sync.transport
    needed = _DEVICE_OF.get(transport)
    if needed is None:
        return ""
    reference = spec.rollout.pool_ref
    engine = f"RolloutPool {reference.name} engine.device" if reference else "rollout.template.engine.device"
    devices = {"trainer.device": spec.trainer.device, engine: pool.engine.device}
    others = [f"{field} is {device}" for field, device in devices.items() if device != needed]
    if not others:
        return ""
    return (
        f"{_FIELD}={transport}: it connects {needed} devices only, but {' and '.join(others)}: set transport "
        "to auto, which selects the path that fits the devices"
    )


def pool_weight_path_problem(spec: RolloutPoolSpec) -> str:
    """Return why a RolloutPool without a job cannot use its ``spec.weightSync.transport``, or ""."""
    if spec.weight_sync.transport != "cuda-ipc":
        return ""
    return (
        f"{_FIELD}=cuda-ipc: it needs trainer and engines on the same GPUs, but the engines of a RolloutPool "
        "have GPUs of their own: set transport to auto"
    )


def _direct(spec: GRPOJobSpec, pool: RolloutTemplate) -> Backend | None:
    sync, device = spec.weight_sync, spec.trainer.device
    if sync.transport == "cuda-ipc":
        return Backend.CUDA_IPC
    if sync.transport in ("staged", "nixl") or sync.mode == "delta":
        return None
    # NCCL refuses two processes on one GPU.
    if sync.transport == "auto" and spec.shares_gpus:
        return None
    # No backend connects GPUs with CPUs.
    return _BACKEND_OF[device] if pool.engine.device == device else None


def _agents_settings(spec: GRPOJobSpec, pool: RolloutTemplate) -> WeightSyncSpec:
    """Return the settings that the engines' agents were started with: a shared pool has its own."""
    if spec.rollout.pool_ref is not None and isinstance(pool, RolloutPoolSpec):
        return pool.weight_sync
    return spec.weight_sync


def _staged(sync: WeightSyncSpec) -> Literal["http", "nixl"]:
    return "nixl" if sync.transport == "nixl" else "http"
