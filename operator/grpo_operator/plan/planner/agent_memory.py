"""Host memory of the agents beside ranks and engines (pure).

The kernel charges a page of a memory volume to the container that writes it first. So an agent is charged for
what it fetches into the pod's memory, and the ranks for what they write there.
"""

from grpo_operator.api.base import AGENT_RESOURCES, Device
from grpo_operator.api.catalog.gpus import GPUS
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import EngineSpec
from grpo_operator.api.weight_path import WeightPath
from grpo_operator.plan.capacity.feasibility import quantity
from grpo_operator.plan.planner.model import parameters
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.memory import BF16, FP32, StageMemory

_GIB = 2**30
# Two chunks, the plan of a version of 100 000 slices, and the process (measured).
AGENT_MEMORY = int(quantity(AGENT_RESOURCES.requests()["memory"]))
_UNKNOWN = _GIB  # of a CPU process: a snapshot, or weights, of a model that only the pods can read (assumed)
# The newest complete snapshot, and the one that is being written (grpo_worker.checkpointing.snapshots).
GENERATIONS = 2


def snapshots_of_pod(spec: GRPOJobSpec, stages: tuple[StageMemory, ...]) -> int:
    """Return the bytes of one snapshot of each rank of a pod; 0 without a memory tier.

    A snapshot has all weights of the rank, and its part of the optimizer state. ``stages``: empty for a model
    that only the pods can read.
    """
    trainer = spec.trainer
    on_gpu = trainer.device is Device.CUDA
    if spec.checkpoint.memory is None:
        return 0
    if not stages:  # a rank's state fits on its GPU
        return trainer.gpus_per_node * (GPUS[trainer.gpu_type].memory if on_gpu else _UNKNOWN)
    frozen = spec.algorithm.refresh_reference_steps is not None  # the reference changes, so it is saved too
    width = (BF16 if on_gpu else FP32).weights
    each = (
        local_parameters(stage, spec, width) * (1 + frozen) * width + stage.optimizer_shard
        for stage in stages
    )
    return trainer.gpus_per_node * max(each)


def local_parameters(stage: StageMemory, spec: GRPOJobSpec, width: int = BF16.weights) -> int:
    """Return the trained parameters on one rank of a stage. ``width``: bytes of one in ``stage.weights``."""
    models = 2 if spec.algorithm.critic else 1
    resident = 1 if spec.trainer.offload.parameters else models
    return stage.weights // width * models // resident


def written_by_ranks(snapshots: int) -> int:
    """Return the bytes of a pod's ranks for their own snapshots: the files, and the copy that is written."""
    return (GENERATIONS + 1) * snapshots


def trainer_agent(snapshots: int, replicas: int, nodes: int) -> int:
    """Return the bytes of a training pod's agent. ``snapshots``: see ``snapshots_of_pod``.

    It fetches the snapshots of ranks of ``replicas`` other pods, and those of the own ranks when the pod is
    new.
    """
    others = min(replicas, nodes - 1)
    fetched = GENERATIONS * others + (nodes > 1)
    return AGENT_MEMORY + fetched * snapshots


def rollout_agent(path: WeightPath, engine: EngineSpec, model: ModelShape | None, mtp: bool) -> int:
    """Return the bytes of an engine's agent.

    It holds whole versions where it applies deltas, which change the one before, or reads over NIXL, which
    reads whole blobs. ``mtp``: versions have the multi-token-prediction layer.
    """
    whole = path.delta or path.staged == "nixl"
    return AGENT_MEMORY + (_version(engine, model, mtp) if whole else 0)


def _version(engine: EngineSpec, model: ModelShape | None, mtp: bool) -> int:
    on_gpu = engine.device is Device.CUDA
    if model is not None:
        return parameters.model_bytes(model, engine.quantization != "none", mtp) * (1 if on_gpu else 2)
    if on_gpu:  # the weights fit on the engine's GPUs
        return int(engine.tensor_parallel * GPUS[engine.gpu_type].memory * engine.memory_fraction)
    return _UNKNOWN
