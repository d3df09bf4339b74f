"""Where a model's ``config.json`` comes from: a built-in preset or a Hugging Face directory."""

import json
from pathlib import Path
from typing import Any

from grpo_operator.api.architectures import PRESETS, architecture


def model_config(path: str) -> dict[str, Any]:
    """The ``config.json`` of a model: ``preset:NAME`` or a Hugging Face directory.

    Without ``quantization_config``: how the files store the weights is no property of the model, and
    the trainer holds them dequantised.

    Raises ValueError for an unknown preset, FileNotFoundError for a directory without one.
    """
    if path.startswith("preset:"):
        name = path.removeprefix("preset:")
        if name not in PRESETS:
            raise ValueError(f"spec.model.path: unknown preset {name!r}; known: {', '.join(PRESETS)}")
        return architecture(name)
    file = Path(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"spec.model.path: no config.json in {path}")
    config: dict[str, Any] = json.loads(file.read_text())
    config.pop("quantization_config", None)
    return config
