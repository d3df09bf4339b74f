"""Regions that a trainer of a given layout holds and that engines of a given shape need. Pure.

It follows the sharding rules of Megatron-Core and SGLang, so that an update can be planned before any rank
runs. A test compares the trainer's regions with those of real ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.weightsync.planner.regions import FP8, Box, Held, Needed, Tensor

# Dimension that tensor parallelism shards; other tensors are whole on every rank.
_KEYS = ("k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias")
_ROWS = ("embed_tokens.weight", "lm_head.weight", "q_proj.weight", "q_proj.bias", "q_b_proj.weight",
         "kv_b_proj.weight", "gate_proj.weight", "up_proj.weight", *_KEYS)  # fmt: skip
_COLUMNS = ("o_proj.weight", "down_proj.weight")
_NOT_FP8 = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "norm.weight")


@dataclass(frozen=True, slots=True)
class EngineShape:
    """Parallelism of an engine.

    ``tensor``: GPUs of the engine. ``expert``: expert parallelism. ``attention``: tensor parallelism of all
    other weights; 1: every GPU has them completely (SGLang's dp-attention).
    """

    tensor: int
    expert: int
    attention: int = 1


def tensors_of(hf: Mapping[str, Any], fp8: bool = False) -> dict[str, Tensor]:
    """Return every tensor of the model as it is sent."""
    tensors = {}
    for name, shape in family_of(dict(hf)).shapes(dict(hf)).items():
        rows, columns = (shape[0], shape[1] if len(shape) > 1 else 1)
        if name.endswith("e_score_correction_bias"):
            tensors[name] = Tensor(rows, columns, "float32")
        elif fp8 and len(shape) == 2 and not name.endswith(_NOT_FP8):
            tensors[name] = Tensor(rows, columns, FP8)
        else:
            tensors[name] = Tensor(rows, columns)
    return tensors


def trainer_side(hf: Mapping[str, Any], layout: Layout, stage_of: Callable[[int], int]) -> Iterator[Held]:
    """Yield the regions that trainer ranks hold. ``stage_of``: layer -> pipeline stage.

    Ranks are numbered as in Megatron-Core: tensor parallelism innermost, then context, data, pipeline. For
    experts: expert-tensor, expert, expert-data, pipeline.
    """
    stage_size = layout.world // layout.pipeline
    for name, tensor in tensors_of(hf).items():
        base = _stage(name, layout, stage_of) * stage_size
        expert = _expert(name)
        if expert is None:
            cut, copies = layout.tensor, stage_size // layout.tensor
            ranks = [[base + copy * cut + i for copy in range(copies)] for i in range(cut)]
        else:
            cut = layout.expert_tensor
            owner = expert * layout.expert // _experts(hf)
            first = base + owner * cut
            stride = layout.expert * cut
            ranks = [[first + copy * stride + i for copy in range(layout.expert_data)] for i in range(cut)]
        yield from (Held(name, box, tuple(who)) for box, who in _cut(name, tensor, ranks))


def engine_side(hf: Mapping[str, Any], engine: EngineShape, engines: int) -> Iterator[Needed]:
    """Yield the regions that engine GPUs need; GPUs are numbered engine by engine."""
    starts = [number * engine.tensor for number in range(engines)]
    sharing = engine.tensor // engine.expert  # GPUs that share an expert
    for name, tensor in tensors_of(hf).items():
        expert = _expert(name)
        if expert is None:
            cut = engine.attention
            own = [[i + copy * cut for copy in range(engine.tensor // cut)] for i in range(cut)]
            if name.endswith(_KEYS):
                own = _with_copied_heads(own, int(hf["num_key_value_heads"]))
        else:
            owner = expert * engine.expert // _experts(hf)
            own = [[owner * sharing + i] for i in range(sharing)]
        ranks = [[start + i for start in starts for i in who] for who in own]
        yield from (Needed(name, box, tuple(who)) for box, who in _cut(name, tensor, ranks))


def _with_copied_heads(own: list[list[int]], heads: int) -> list[list[int]]:
    """Return the GPUs of each part: where there are too few key heads, consecutive GPUs have the same one."""
    copies = max(len(own) // heads, 1)
    return [[*chain(*own[first : first + copies])] for first in range(0, len(own), copies)]


def kept_by_rank(hf: Mapping[str, Any], engine: EngineShape) -> dict[int, dict[str, list[Box]]]:
    """Return the regions of each tensor that each rank of one engine keeps."""
    kept: dict[int, dict[str, list[Box]]] = {rank: {} for rank in range(engine.tensor)}
    for need in engine_side(hf, engine, 1):
        for rank in need.gpus:
            kept[rank].setdefault(need.tensor, []).append(need.box)
    return kept


def _cut(name: str, tensor: Tensor, ranks: list[list[int]]) -> Iterator[tuple[Box, list[int]]]:
    """Yield equal parts along the sharded dimension, part i for ranks[i]."""
    parts = len(ranks)
    if parts == 1 or not name.endswith(_ROWS + _COLUMNS):
        yield tensor.box, sorted(rank for who in ranks for rank in who)
        return
    for i, who in enumerate(ranks):
        if name.endswith(_ROWS):
            step = tensor.rows // parts
            yield Box(i * step, (i + 1) * step, 0, tensor.columns), who
        else:
            step = tensor.columns // parts
            yield Box(0, tensor.rows, i * step, (i + 1) * step), who


def _stage(name: str, layout: Layout, stage_of: Callable[[int], int]) -> int:
    if name.startswith("model.layers."):
        return stage_of(int(name.split(".")[2]))
    return 0 if name.startswith("model.embed_tokens") else layout.pipeline - 1


def _experts(hf: Mapping[str, Any]) -> int:
    """Return the number of routed experts of a layer, for which the families have two names."""
    return int(hf["n_routed_experts"] if "n_routed_experts" in hf else hf["num_experts"])


def _expert(name: str) -> int | None:
    if ".mlp.experts." not in name:
        return None
    return int(name.split(".mlp.experts.")[1].split(".", maxsplit=1)[0])
