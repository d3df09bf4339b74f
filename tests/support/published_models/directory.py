"""Hugging Face directories of the published models in a small size, one for each generation of files."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from grpo_worker.megatron.conversion.readers import SeededWeights
from grpo_worker.megatron.families.registry import family_of
from support.published_models.files import (
    MODELS,
    config,
    template_of,
    write_small_files,
    write_small_files_of_4,
)

__all__ = ["GENERATIONS", "MODELS", "template_of", "write"]

# Who has written the files: the model's authors, or save_pretrained of a generation of transformers.
GENERATIONS = ("published", "transformers-4", "transformers-5")
_WEIGHTS = "model.safetensors"


def write(
    model: str, generation: str, folder: Path, seed: int = 1, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a whole directory with random weights.

    Only the published DeepSeek files hold the multi-token-prediction layer: transformers drops it on saving,
    and leaves num_nextn_predict_layers as it is. Raises ValueError for an unknown model or generation.
    """
    if model not in MODELS:
        raise ValueError(f"model={model!r}: use one of {', '.join(MODELS)}")
    if generation == "published":
        write_small_files(model, folder)
        _write_weights(_published_weights(model, seed), folder, dtype)
    elif generation == "transformers-4":
        write_small_files_of_4(model, folder)
        _write_weights(_weights(model, seed), folder, dtype)
    elif generation == "transformers-5":
        _save_with_transformers_5(model, folder, seed, dtype)
    else:
        raise ValueError(f"generation={generation!r}: use one of {', '.join(GENERATIONS)}")
    return folder


def _weights(model: str, seed: int) -> dict[str, torch.Tensor]:
    """Tensors of all layers but the one for multi-token prediction."""
    hf = config(model)
    return _drawn(hf, seed, list(family_of(hf).shapes(hf)))


def _published_weights(model: str, seed: int) -> dict[str, torch.Tensor]:
    """Tensors of all layers; the last one of DeepSeek repeats the embeddings and the output projection."""
    hf, weights = config(model), _weights(model, seed)
    if not hf.get("num_nextn_predict_layers"):
        return weights
    layer = f"model.layers.{hf['num_hidden_layers']}."
    shared = {
        layer + "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        layer + "shared_head.head.weight": weights["lm_head.weight"].clone(),
    }
    return weights | _drawn(hf, seed, list(family_of(hf).mtp_shapes(hf))) | shared


def _drawn(hf: dict[str, Any], seed: int, names: list[str]) -> dict[str, torch.Tensor]:
    seeded = SeededWeights(hf, seed)
    return {name: seeded.read(name, 0, 0, seeded.shape(name)[0]).contiguous() for name in names}


def _write_weights(weights: dict[str, torch.Tensor], folder: Path, dtype: torch.dtype) -> None:
    # The published files hold this one in fp32 whatever the others have.
    exact = {name for name in weights if name.endswith("e_score_correction_bias")}
    tensors = {name: tensor if name in exact else tensor.to(dtype) for name, tensor in weights.items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})


def _save_with_transformers_5(model: str, folder: Path, seed: int, dtype: torch.dtype) -> None:
    with tempfile.TemporaryDirectory() as temporary, torch.random.fork_rng(devices=[]):
        small = write_small_files(model, Path(temporary))
        torch.manual_seed(seed)
        causal = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(small), dtype=dtype)
        causal.generation_config = GenerationConfig.from_pretrained(small)
        causal.save_pretrained(folder)
        AutoTokenizer.from_pretrained(small).save_pretrained(folder)
