"""Layouts in which the trainer must compute the same: (model, ranks, sizes) by name."""

LAYOUTS: dict[str, tuple[str, int, dict[str, int]]] = {
    "deepseek-1": ("deepseek_v3", 1, {}),
    "deepseek-tp2": ("deepseek_v3", 2, {"tensor": 2, "expert_tensor": 2}),
    "deepseek-tp2-ep2": ("deepseek_v3", 2, {"tensor": 2, "expert": 2}),
    "deepseek-pp2": ("deepseek_v3", 2, {"pipeline": 2}),
    "deepseek-pp2-uneven": ("deepseek_v3", 2, {"pipeline": 2, "layers_in_first_stage": 3}),
    "deepseek-pp2-vpp2": ("deepseek_v3", 2, {"pipeline": 2, "virtual_pipeline": 2}),
    "deepseek-ep2": ("deepseek_v3", 2, {"expert": 2}),
    "deepseek-cp2": ("deepseek_v3", 2, {"context": 2}),
    "deepseek-dp2": ("deepseek_v3", 2, {}),
    "deepseek-tp2-pp2-ep2": ("deepseek_v3", 4, {"tensor": 2, "pipeline": 2, "expert": 2}),
    "deepseek-tp2-cp2-ep4": ("deepseek_v3", 4, {"tensor": 2, "context": 2, "expert": 4}),
    "qwen3-1": ("qwen3", 1, {}),
    "qwen3-tp2-pp2": ("qwen3", 4, {"tensor": 2, "pipeline": 2, "expert_tensor": 2}),
    "qwen3-tp4": ("qwen3", 4, {"tensor": 4, "expert_tensor": 4}),
    "qwen3-tied-pp2": ("qwen3-tied", 2, {"pipeline": 2}),
    "qwen3-tied-tp2": ("qwen3-tied", 2, {"tensor": 2, "expert_tensor": 2}),
    "qwen3-moe-1": ("qwen3_moe", 1, {}),
    "qwen3-moe-tp2-ep2": ("qwen3_moe", 2, {"tensor": 2, "expert": 2}),
    "qwen3-moe-cp2-pp2": ("qwen3_moe", 4, {"context": 2, "pipeline": 2}),
}
