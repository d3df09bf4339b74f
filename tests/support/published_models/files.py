"""The published models' own small files, in a size that a CPU trains.

``published/models`` holds each config.json and generation_config.json as published, ``published/tokenizers``
the tokenizers that shrink_tokenizer.py made. Only sizes change on the way into a directory, and with the
vocabulary the ids of special tokens. This module imports nothing but the standard library, so that another
generation of transformers can use it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent / "snapshots"
# What save_with_transformers_4.py has written.
SAVED_BY_4 = _HERE / "transformers-4"
# Model -> the tokenizer_config.json that it was published with.
TOKENIZERS = {
    "DeepSeek-V3": "deepseek-v3",
    "DeepSeek-V3-Base": "deepseek-v3",
    "DeepSeek-R1": "deepseek-r1",
    "Qwen3-8B": "qwen3",
    "Qwen3-8B-Base": "qwen3-base",
    "Qwen3-30B-A3B": "qwen3",
    "Qwen3-30B-A3B-Base": "qwen3-base",
    "Qwen3-235B-A22B": "qwen3",
}
MODELS = tuple(TOKENIZERS)
# The models of a family share one tokenizer.json.
_TOKENIZER_JSON = {"deepseek-r1": "deepseek-v3", "qwen3-base": "qwen3"}
# Published models round their vocabulary up: these rows are no tokens either.
_VOCAB_SIZE = 1408
_DEEPSEEK_V3 = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 4,
}
_QWEN3 = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "head_dim": 16,
}
_QWEN3_8B = _QWEN3 | {"num_key_value_heads": 4}
_QWEN3_MOE = _QWEN3 | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LARGER = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 16,
    "moe_intermediate_size": 64,
}
SIZES: dict[str, dict[str, int]] = {
    "DeepSeek-V3": _DEEPSEEK_V3,
    "DeepSeek-V3-Base": _DEEPSEEK_V3,
    "DeepSeek-R1": _DEEPSEEK_V3,
    "Qwen3-8B": _QWEN3_8B,
    "Qwen3-8B-Base": _QWEN3_8B,
    "Qwen3-30B-A3B": _QWEN3_MOE,
    "Qwen3-30B-A3B-Base": _QWEN3_MOE,
    "Qwen3-235B-A22B": _QWEN3_MOE | _LARGER,
}
# Qwen3's special tokens follow its vocabulary; DeepSeek's first three precede it and keep their ids.
_QWEN3_FIRST_SPECIAL = 151643
_TOKEN_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def as_published(model: str, name: str) -> dict[str, Any]:
    """``config.json`` or ``generation_config.json`` of a model, in the size that it was published in."""
    if model not in MODELS:
        raise ValueError(f"model={model!r}: use one of {', '.join(MODELS)}")
    return read(_HERE / "models" / model / name)


def config(model: str) -> dict[str, Any]:
    """The ``config.json`` of a model's small form.

    It names no quantization, since the weights are not stored in FP8.
    """
    published = as_published(model, "config.json")
    published.pop("quantization_config", None)
    return _with_ids(model, published | SIZES[model] | {"vocab_size": _VOCAB_SIZE})


def generation_config(model: str) -> dict[str, Any]:
    """The ``generation_config.json`` of a model's small form."""
    return _with_ids(model, as_published(model, "generation_config.json"))


def template_of(model: str) -> str:
    """The chat template that a model was published with."""
    return str(read(_HERE / "tokenizers" / TOKENIZERS[model] / "tokenizer_config.json")["chat_template"])


def tokenizer_json(model: str, generation: str = "published") -> Path:
    """The small ``tokenizer.json`` of a model: as published, or as transformers 4 saves it."""
    name = _TOKENIZER_JSON.get(TOKENIZERS[model], TOKENIZERS[model])
    published = _HERE / "tokenizers" / name / "tokenizer.json"
    saved = SAVED_BY_4 / "tokenizers" / name / "tokenizer.json"
    return saved if generation == "transformers-4" and saved.is_file() else published


def write_small_files(model: str, folder: Path) -> Path:
    """Write everything but the weights, as published."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(model), indent=2))
    (folder / "generation_config.json").write_text(json.dumps(generation_config(model), indent=2))
    shutil.copy(tokenizer_json(model), folder)
    shutil.copy(_HERE / "tokenizers" / TOKENIZERS[model] / "tokenizer_config.json", folder)
    return folder


def write_small_files_of_4(model: str, folder: Path) -> Path:
    """Write everything but the weights, as transformers 4 has saved it."""
    folder.mkdir(parents=True, exist_ok=True)
    for saved in (SAVED_BY_4 / "models" / model, SAVED_BY_4 / "tokenizers" / TOKENIZERS[model]):
        for file in saved.iterdir():
            shutil.copy(file, folder)
    shutil.copy(tokenizer_json(model, "transformers-4"), folder)
    return folder


def read(file: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    content: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return content


def _with_ids(model: str, content: dict[str, Any]) -> dict[str, Any]:
    """The same file with the ids of the smaller vocabulary."""
    special = [token["id"] for token in read(tokenizer_json(model))["added_tokens"]]
    shift = _QWEN3_FIRST_SPECIAL - special[0] if TOKENIZERS[model].startswith("qwen3") else 0
    moved = {name: _moved(content[name], shift) for name in _TOKEN_FIELDS if name in content}
    return content | moved


def _moved(ids: Any, shift: int) -> Any:
    return [token - shift for token in ids] if isinstance(ids, list) else ids - shift
