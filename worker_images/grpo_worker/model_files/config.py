"""Canonical ``config.json`` of a model, independent of the version of transformers that wrote it.

The canonical form uses the names of the published models. Transformers 5 writes ``num_local_experts``,
``rope_parameters`` and ``dtype`` instead, and drops fields that its classes do not read but SGLang does.
Every engine's container imports this module at start, so it imports no third-party library.
"""

import json
from pathlib import Path
from typing import Any

from grpo_operator.api.catalog.presets import PRESET, preset
from grpo_worker.model_files.errors import ModelFilesError, unreadable

_RENAMED = {"num_local_experts": "num_experts", "dtype": "torch_dtype"}
# Fields that transformers adds to published files: defaults of its classes, or derived from other fields.
_ADDED_BY_TRANSFORMERS = frozenset(
    {
        "_name_or_path", "auto_map", "chunk_size_feed_forward", "id2label", "is_encoder_decoder", "label2id",
        "output_attentions", "output_hidden_states", "problem_type", "return_dict",
    }
)  # fmt: skip
_DERIVED = {"deepseek_v3": frozenset({"head_dim", "qk_head_dim", "rope_interleave"})}
# SGLang reads these fields, but transformers' classes do not have them and drop them on saving.
_COMPLETED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
}
# Storage of the weights, which is not a property of the model: the trainer dequantises them.
_STORAGE = frozenset({"quantization_config"})


def model_config(path: str) -> dict[str, Any]:
    """Return the canonical ``config.json`` of ``preset:NAME`` or of a Hugging Face directory.

    Raises ModelFilesError that names the file, or ValueError for an unknown preset.
    """
    if path.startswith(PRESET):
        return preset(path)
    return canonical(read_json(Path(path) / "config.json"))


def read_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model. Raises ModelFilesError."""
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ModelFilesError(file.parent, f"there is no {file.name}") from error
    except PermissionError as error:
        raise ModelFilesError(file.parent, unreadable(file.name)) from error
    except (OSError, ValueError) as error:
        raise ModelFilesError(file.parent, f"{file.name} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelFilesError(file.parent, f"{file.name} contains no JSON object")
    return content


def canonical(config: dict[str, Any]) -> dict[str, Any]:
    """Return a ``config.json`` with the names and all the fields of a published one."""
    kind = config.get("model_type")
    dropped = _ADDED_BY_TRANSFORMERS | _STORAGE | _DERIVED.get(str(kind), frozenset())
    renamed = {_RENAMED.get(name, name): value for name, value in config.items() if name not in dropped}
    completed = _COMPLETED.get(str(kind), {}) | _with_rope(renamed)
    if kind == "deepseek_v3":  # transformers' alias of n_routed_experts, the published name
        completed.pop("num_experts", None)
    return completed


def _with_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Split ``rope_parameters`` of transformers 5 into the fields of published files."""
    merged = config.pop("rope_parameters", None)
    if merged is None:
        return config
    kind = merged.get("rope_type", merged.get("type", "default"))
    # Some readers look for the kind of scaling under ``type``, others under ``rope_type``.
    scaling = None if kind == "default" else merged | {"type": kind, "rope_type": kind}
    own = {"rope_theta": merged.get("rope_theta", config.get("rope_theta")), "rope_scaling": scaling}
    if "partial_rotary_factor" in merged:
        own["partial_rotary_factor"] = merged["partial_rotary_factor"]
    return config | own
