"""Layouts in which the trainer must compute the same: (model, ranks, sizes) by name."""

Case = tuple[str, int, dict[str, int]]

# Each axis alone, and axes beside each other: name -> ranks and sizes.
_ANY: dict[str, tuple[int, dict[str, int]]] = {
    "1": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, {"tensor": 2, "expert_tensor": 2}),
    "pp2": (2, {"pipeline": 2}),
    "pp2-vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
    "cp2": (2, {"context": 2}),
    "cp2-pp2": (4, {"context": 2, "pipeline": 2}),
    "tp2-pp2": (4, {"tensor": 2, "pipeline": 2, "expert_tensor": 2}),
}
_OF_EXPERTS: dict[str, tuple[int, dict[str, int]]] = {
    "ep2": (2, {"expert": 2}),
    "tp2-ep2": (2, {"tensor": 2, "expert": 2}),
    "cp2-ep2": (2, {"context": 2, "expert": 2}),
    "tp2-pp2-ep2": (4, {"tensor": 2, "pipeline": 2, "expert": 2}),
    "tp2-cp2-ep4": (4, {"tensor": 2, "context": 2, "expert": 4}),
}
_DENSE = {"qwen3": "qwen3", "llama": "llama", "qwen2": "qwen2"}
_WITH_EXPERTS = {"deepseek": "deepseek_v3", "qwen3-moe": "qwen3_moe", "glm": "glm4_moe", "kimi": "kimi_k2"}
# What only some models have: shared embeddings, other numbers of layers and heads, no norms of queries.
_SINGLE: dict[str, Case] = {
    "deepseek-pp2-uneven": ("deepseek_v3", 2, {"pipeline": 2, "layers_in_first_stage": 3}),
    "deepseek-pp2-vpp2-uneven": ("deepseek_v3-7-layers", 2, {"pipeline": 2, "virtual_pipeline": 2}),
    "qwen3-tp4": ("qwen3", 4, {"tensor": 4, "expert_tensor": 4}),
    "qwen3-tied-pp2": ("qwen3-tied", 2, {"pipeline": 2}),
    "qwen3-tied-tp2": ("qwen3-tied", 2, {"tensor": 2, "expert_tensor": 2}),
    "llama-tied-tp2": ("llama-tied", 2, {"tensor": 2, "expert_tensor": 2}),
    "glm-no-norms-1": ("glm4_moe-no-norms", 1, {}),
}


def _of(family: str, model: str, layouts: dict[str, tuple[int, dict[str, int]]]) -> dict[str, Case]:
    return {f"{family}-{name}": (model, *layout) for name, layout in layouts.items()}


LAYOUTS: dict[str, Case] = {
    name: case
    for models, layouts in ((_DENSE, _ANY), (_WITH_EXPERTS, _ANY | _OF_EXPERTS))
    for family, model in models.items()
    for name, case in _of(family, model, layouts).items()
} | _SINGLE
