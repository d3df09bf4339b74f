"""Where initial weights come from: a seed, or the safetensors files of a Hugging Face directory."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def weight_reader(path: str, hf: dict[str, Any], seed: int) -> Callable[[str], torch.Tensor]:
    """Return a function from a Hugging Face tensor name to the whole tensor (fp32).

    Presets have no files: each tensor is drawn from its own generator, seeded by the job's
    seed and the tensor's name, so every layout starts from the same weights.
    """
    if path.startswith("preset:"):
        shapes = tensor_shapes(hf)
        std = float(hf["initializer_range"])
        return lambda name: _draw(name, shapes[name], seed, std)
    return _from_safetensors(Path(path))


def _draw(name: str, shape: tuple[int, ...], seed: int, std: float) -> torch.Tensor:
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if name.endswith("e_score_correction_bias"):
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(shape, generator=generator) * std


def _from_safetensors(directory: Path) -> Callable[[str], torch.Tensor]:
    from safetensors import safe_open

    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files: dict[str, str] = json.loads(index.read_text())["weight_map"]
    else:
        with safe_open(directory / "model.safetensors", "pt") as handle:
            files = dict.fromkeys(handle.keys(), "model.safetensors")

    def read(name: str) -> torch.Tensor:
        if name not in files:
            raise KeyError(f"{name} is in none of the safetensors files of {directory}")
        with safe_open(directory / files[name], "pt") as handle:
            tensor: torch.Tensor = handle.get_tensor(name)
        return tensor.float()

    return read


def tensor_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of each tensor of a DeepSeek-V3 model as its checkpoint stores them."""
    hidden, vocab = hf["hidden_size"], hf["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(hf["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        parts = _attention_shapes(hf) | _mlp_shapes(hf, layer)
        shapes |= {prefix + name: shape for name, shape in parts.items()}
    return shapes


def _attention_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, heads = hf["hidden_size"], hf["num_attention_heads"]
    nope, rope, value = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["v_head_dim"]
    q_rank, kv_rank = hf["q_lora_rank"], hf["kv_lora_rank"]
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        "self_attn.kv_a_layernorm.weight": (kv_rank,),
        "self_attn.kv_b_proj.weight": (heads * (nope + value), kv_rank),
        "self_attn.o_proj.weight": (hidden, heads * value),
    }
    if q_rank is None:
        return shapes | {"self_attn.q_proj.weight": (heads * (nope + rope), hidden)}
    return shapes | {
        "self_attn.q_a_proj.weight": (q_rank, hidden),
        "self_attn.q_a_layernorm.weight": (q_rank,),
        "self_attn.q_b_proj.weight": (heads * (nope + rope), q_rank),
    }


def _mlp_shapes(hf: dict[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    hidden, experts = hf["hidden_size"], hf["n_routed_experts"]
    if layer < hf["first_k_dense_replace"]:
        return _gated("mlp.", hidden, hf["intermediate_size"])
    width = hf["moe_intermediate_size"]
    shapes = _gated("mlp.shared_experts.", hidden, width * hf["n_shared_experts"])
    shapes["mlp.gate.weight"] = (experts, hidden)
    shapes["mlp.gate.e_score_correction_bias"] = (experts,)
    for expert in range(experts):
        shapes |= _gated(f"mlp.experts.{expert}.", hidden, width)
    return shapes


def _gated(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj.weight": (width, hidden),
        prefix + "up_proj.weight": (width, hidden),
        prefix + "down_proj.weight": (hidden, width),
    }
