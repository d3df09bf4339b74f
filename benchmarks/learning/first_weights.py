"""The initial weights of a job as a Hugging Face directory."""

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from grpo_worker.megatron.conversion.readers import SeededWeights
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.model_files.names import TINY_TOKENIZER


def write(folder: Path, hf: dict[str, Any], seed: int) -> Path:
    """Write the initial weights of a job with this config.json and seed, for transformers."""
    weights, family = SeededWeights(hf, seed), family_of(hf)
    shapes = family.shapes(hf) | (family.mtp_shapes(hf) if hf.get("num_nextn_predict_layers") else {})
    tensors = {name: weights.read(name, 0, 0, shape[0]).contiguous() for name, shape in shapes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(hf))
    shutil.copy(TINY_TOKENIZER, folder / "tokenizer.json")
    return folder
