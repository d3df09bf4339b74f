"""``config.json`` of an exported model: the job's, and what is true of these files."""

from collections.abc import Collection
from typing import Any, Literal

from grpo_worker.model_files.names import FP8_CONFIG

Quantization = Literal["none", "fp8-block128"]
_NEXT = "num_nextn_predict_layers"
_ROUTER = ".mlp.gate.weight"
# Of the files that the job started from, which these are not.
_STALE = ("dtype", "torch_dtype", "quantization_config", "transformers_version")


def exported_config(
    hf: dict[str, Any], names: Collection[str], dtype: str, quantization: Quantization
) -> dict[str, Any]:
    """config.json of files with the tensors ``names``, of ``dtype`` where they are not quantised."""
    config = {key: value for key, value in hf.items() if key not in _STALE} | {"torch_dtype": dtype}
    first_after = f"model.layers.{hf['num_hidden_layers']}."
    if _NEXT in hf and not any(name.startswith(first_after) for name in names):
        config[_NEXT] = 0  # engines would look for the layer
    if quantization != "none":
        config["quantization_config"] = _quantization(hf, names)
    return config


def _quantization(hf: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """As in the published files: engines take a router of Qwen3 for a quantised projection, unless it is
    listed; those of DeepSeek-V3 they know."""
    routers = sorted(name.removesuffix(".weight") for name in names if name.endswith(_ROUTER))
    if not routers or hf["model_type"] == "deepseek_v3":
        return dict(FP8_CONFIG)
    return FP8_CONFIG | {"modules_to_not_convert": ["lm_head", *routers]}
