"""GPUs of a configuration: the training pool, its parallel layout, and the engines."""

from dataclasses import dataclass

from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.convert.choices import Choices
from grpo_operator.convert.draft import Draft

_ENGINE = "rollout.template.engine"
_LARGEST_FRACTION = 0.85  # of the GPU memory, that engines may have beside waiting trainers
_SIZES = {
    "tensor": "tensor",
    "pipeline": "pipeline",
    "context": "context",
    "expert": "expert",
    "expert_tensor": "expertTensor",
    "virtual_pipeline": "virtualPipeline",
    "first_stage": "layersInFirstStage",
    "last_stage": "layersInLastStage",
}


@dataclass(frozen=True, slots=True)
class _Pools:
    """Nodes and GPUs of the trainers. ``rollout_gpus``: all of the engines; None: they share those."""

    nodes: int
    gpus: int
    rollout_gpus: int | None


def place_pools(draft: Draft, choices: Choices) -> None:
    """Set mode, nodes, layout and engines."""
    pools = _pools(draft, choices)
    if pools is None:
        return
    draft.take("trainer.nodes", pools.nodes)
    draft.take("trainer.gpusPerNode", pools.gpus)
    for field in ("trainer.gpuType", f"{_ENGINE}.gpuType"):
        draft.take(field, choices.gpu_type or "h100-80gb")
    if not choices.gpu_type:
        draft.chosen.append("trainer.gpuType, engine.gpuType: h100-80gb: add --gpu-type for others")
    _layout(draft)
    if pools.rollout_gpus is None:
        _colocated(draft, pools)
    else:
        _separate(draft, pools.rollout_gpus)
    length = int(draft.fields["data.promptLength"]) + int(draft.fields["data.responseLength"])
    draft.choose(f"{_ENGINE}.contextLength", length, "data.promptLength + data.responseLength")


def _pools(draft: Draft, choices: Choices) -> _Pools | None:
    gpus = draft.fact("gpus_per_node", 8)
    if gpus > 16:
        draft.refuse("gpus_per_node", "a node has at most 16 GPUs: split them into more nodes")
        return None
    own = draft.fact("rollout_gpus")
    own_nodes = -(-own // gpus) if own else 0
    nodes = choices.nodes or draft.fact("nodes", 1) + own_nodes
    if (given := choices.rollout_nodes) is not None:
        own_nodes, own = given, given * gpus
        draft.chosen.append(f"mode: static: {given} of {nodes} nodes are for engines: --rollout-nodes")
    if not own_nodes < nodes:
        draft.errors.append(
            f"--rollout-nodes={own_nodes}: there are {nodes} nodes in all: leave at least one to the "
            "trainers, or add --nodes N"
        )
        return None
    if "trainer_gpus" in draft.facts and given is None:  # both pools are on one node
        return _Pools(1, draft.fact("trainer_gpus"), own)
    return _Pools(nodes - own_nodes, gpus, own)


def _layout(draft: Draft) -> None:
    given = {field: draft.fact(fact) for fact, field in _SIZES.items() if draft.fact(fact) is not None}
    prefix = "trainer.parallelism"
    if any(name in given for name in ("tensor", "pipeline", "expert")):
        if given.get("expert", 1) > 1 and "expertTensor" not in given:
            given["expertTensor"] = given.get("tensor", 1)
        if given.get("pipeline", 1) == 1:
            given = {
                k: v for k, v in given.items() if k not in ("virtualPipeline", *list(_SIZES.values())[-2:])
            }
        given |= _uneven_stages(draft, given.get("pipeline", 1))
        for field, size in given.items():
            draft.take(f"{prefix}.{field}", size)
    elif "model.architecture" in draft.fields:
        draft.choose(f"{prefix}.auto", True, "the source shards by FSDP: the planner chooses a layout")
    else:
        size = draft.fact("engine_gpus", 1)
        reason = "as the engines' in the source: memory is not planned without model.architecture"
        draft.choose(f"{prefix}.tensor", size, reason)


def _uneven_stages(draft: Draft, stages: int) -> dict[str, int]:
    """Return the layers of the outer stages where Megatron-Core counts embedding and loss as layers."""
    first, last = draft.fact("embedding_counts", False), draft.fact("loss_counts", False)
    if stages == 1 or not (first or last):
        return {}
    name = draft.fields.get("model.architecture")
    if name is None:
        draft.lacks(
            "loss_counts" if last else "embedding_counts", "set layersInFirstStage and layersInLastStage"
        )
        return {}
    each, rest = divmod(architecture(name)["num_hidden_layers"] + first + last, stages)
    if rest:
        return {}
    fields = (("layersInFirstStage", first), ("layersInLastStage", last))
    return {field: each - 1 for field, counts in fields if counts}


def _colocated(draft: Draft, pools: _Pools) -> None:
    draft.choose("mode", "colocated", "the source uses the same GPUs for both: --rollout-nodes N splits them")
    for what in ("parameters", "gradients", "optimizer"):
        draft.take(f"trainer.offload.{what}", True)
    draft.chosen.append("trainer.offload: parameters, gradients, optimizer: mode colocated needs them")
    if pools.nodes == 1:
        reason = "all trainers are in one pod; pods run as root: remove it where that is forbidden"
        draft.choose("weightSync.transport", "cuda-ipc", reason)
    draft.take("rollout.template.replicas", pools.nodes)
    draft.take(f"{_ENGINE}.tensorParallel", pools.gpus)
    draft.take(f"{_ENGINE}.gpusPerNode", pools.gpus)
    tensor = draft.fact("engine_gpus", 1)
    if tensor > pools.gpus and "model.architecture" not in draft.fields:
        few = f"an engine that shares GPUs has those of one node, {pools.gpus}, and may not hold the model"
        draft.refuse("engine_gpus", f"{few}: add --rollout-nodes N")
    if tensor != pools.gpus:
        reason = f"an engine has all GPUs of its node, where the source has engines of {tensor}"
        draft.chosen.append(f"{_ENGINE}.tensorParallel: {pools.gpus}: {reason}")
    replicas = _attention_replicas(draft, tensor, pools.gpus)
    if replicas > 1:
        reason = f"attention on {tensor} GPUs as in the source, because the model's heads must divide"
        draft.choose(f"{_ENGINE}.attentionDataParallel", replicas, reason)
    _expert_parallel(draft, pools.gpus)
    fraction = draft.fact("memory_fraction", _LARGEST_FRACTION)
    if fraction > _LARGEST_FRACTION:
        draft.choose(f"{_ENGINE}.memoryFraction", _LARGEST_FRACTION, "waiting trainers keep the rest")
    else:
        draft.take(f"{_ENGINE}.memoryFraction", fraction)


def _attention_replicas(draft: Draft, tensor: int, gpus: int) -> int:
    """Return replicas of the attention layers with which the model's heads divide."""
    name = draft.fields.get("model.architecture")
    heads = architecture(name)["num_attention_heads"] if name else None
    if tensor >= gpus or gpus % tensor or (heads is not None and heads % gpus == 0):
        return 1
    return gpus // tensor


def _separate(draft: Draft, gpus: int) -> None:
    """Set the engines of a pool with GPUs of its own. ``gpus``: all of them."""
    draft.take("mode", "static")
    for what in ("parameters", "gradients", "optimizer"):
        if draft.fact(f"offload_{what}", False):
            draft.take(f"trainer.offload.{what}", True)
    tensor, of_node = draft.fact("engine_gpus", 1), draft.fact("gpus_per_node", 8)
    per_node = min(tensor, of_node)
    if tensor % per_node or gpus < tensor:
        instead = f"an engine must fill whole nodes of {of_node} GPUs, and the engines have {gpus} in all"
        draft.refuse("engine_gpus", f"{instead}: add nodes")
        return
    draft.take("rollout.template.replicas", gpus // tensor)
    draft.take(f"{_ENGINE}.tensorParallel", tensor)
    draft.take(f"{_ENGINE}.gpusPerNode", per_node)
    if tensor > per_node:
        draft.take(f"{_ENGINE}.nodesPerEngine", tensor // per_node)
    if replicas := draft.fact("attention_replicas"):
        draft.take(f"{_ENGINE}.attentionDataParallel", replicas)
    _expert_parallel(draft, tensor)
    draft.take(f"{_ENGINE}.memoryFraction", draft.fact("memory_fraction", 0.85))


def _expert_parallel(draft: Draft, tensor: int) -> None:
    size = draft.fact("engine_expert", 1)
    if size > 1 and tensor % size == 0:
        draft.take(f"{_ENGINE}.expertParallel", size)
    elif size > 1:
        draft.lacks(
            "engine_expert", f"must divide the engine's {tensor} GPUs: the experts are split by tensors"
        )
