"""The ``config.json`` of a model in one form, whichever generation of transformers has written it.

That form has the names that the models were published with: transformers 5 writes ``num_local_experts``,
``rope_parameters`` and ``dtype`` instead, and leaves out what its own classes do not read but SGLang does.
Every engine's container starts with this module, so it imports no library.
"""

import json
from pathlib import Path
from typing import Any

from grpo_operator.api.catalog.architectures import PRESETS, architecture
from grpo_worker.model_files.errors import ModelFilesError

PRESET = "preset:"
_RENAMED = {"num_local_experts": "num_experts", "dtype": "torch_dtype"}
# What a class of transformers adds and a published file lacks: constants of Python, or derived from others.
_NOT_THE_MODELS = frozenset(
    {
        "_name_or_path", "auto_map", "chunk_size_feed_forward", "id2label", "is_encoder_decoder", "label2id",
        "output_attentions", "output_hidden_states", "problem_type", "return_dict",
    }
)  # fmt: skip
_DERIVED = {"deepseek_v3": frozenset({"head_dim", "qk_head_dim", "rope_interleave"})}
# SGLang reads these, and transformers' class, which has no such fields, drops them on saving.
_COMPLETED: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    "qwen3_moe": {"decoder_sparse_step": 1, "mlp_only_layers": []},
}
# How files store the weights is no property of the model: the trainer holds them dequantised.
_STORAGE = frozenset({"quantization_config"})


def model_config(path: str) -> dict[str, Any]:
    """Read the ``config.json`` of ``preset:NAME`` or of a Hugging Face directory.

    Raises ModelFilesError that names the file, or ValueError for an unknown preset.
    """
    if path.startswith(PRESET):
        name = path.removeprefix(PRESET)
        if name not in PRESETS:
            raise ValueError(f"spec.model.path: unknown preset {name!r}; known: {', '.join(PRESETS)}")
        return architecture(name)
    return canonical(read_json(Path(path) / "config.json"))


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a model. Raises ModelFilesError."""
    try:
        found = json.loads(file.read_text())
    except FileNotFoundError as error:
        raise ModelFilesError(file.parent, f"there is no {file.name}") from error
    except (OSError, ValueError) as error:
        raise ModelFilesError(file.parent, f"{file.name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ModelFilesError(file.parent, f"{file.name} holds no JSON object")
    return found


def canonical(config: dict[str, Any]) -> dict[str, Any]:
    """A ``config.json`` with the names, and all the fields, that a published one has."""
    kind = config.get("model_type")
    dropped = _NOT_THE_MODELS | _STORAGE | _DERIVED.get(str(kind), frozenset())
    renamed = {_RENAMED.get(name, name): value for name, value in config.items() if name not in dropped}
    found = _COMPLETED.get(str(kind), {}) | _with_rope(renamed)
    if kind == "deepseek_v3":  # an alias there of n_routed_experts, which is published
        found.pop("num_experts", None)
    return found


def _with_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Transformers 5 keeps the base and the scaling of rotary embeddings in one field."""
    merged = config.pop("rope_parameters", None)
    if merged is None:
        return config
    kind = merged.get("rope_type", merged.get("type", "default"))
    # Some readers know the kind of scaling as ``type``, others as ``rope_type``.
    scaling = None if kind == "default" else merged | {"type": kind, "rope_type": kind}
    own = {"rope_theta": merged.get("rope_theta", config.get("rope_theta")), "rope_scaling": scaling}
    return config | own
