"""``config.json`` of an exported model, derived from that of the job's model."""

from collections.abc import Collection
from typing import Any, Literal

from grpo_operator.api.v1alpha1.moe import WITH_EXPERT_BIAS
from grpo_worker.model_files.names import FP8_CONFIG

Quantization = Literal["none", "fp8-block128"]
_MTP_LAYERS = "num_nextn_predict_layers"
_ROUTER = ".mlp.gate.weight"
# Fields that describe the files that the job started from.
_STALE = ("dtype", "torch_dtype", "quantization_config", "transformers_version")


def exported_config(
    hf: dict[str, Any], names: Collection[str], dtype: str, quantization: Quantization
) -> dict[str, Any]:
    """Return the config.json of files with the tensors ``names``.

    ``dtype``: of the tensors that are not quantised.
    """
    config = {key: value for key, value in hf.items() if key not in _STALE} | {"torch_dtype": dtype}
    first_after = f"model.layers.{hf['num_hidden_layers']}."
    if _MTP_LAYERS in hf and not any(name.startswith(first_after) for name in names):
        config[_MTP_LAYERS] = 0  # otherwise engines would look for the layer
    if quantization != "none":
        config["quantization_config"] = _quantization(hf, names)
    return config


def _quantization(hf: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the quantization config as in published files.

    Engines would load Qwen3's routers as quantised projections unless the config excludes them; they know
    routers with an expert bias.
    """
    routers = sorted(name.removesuffix(".weight") for name in names if name.endswith(_ROUTER))
    if not routers or hf["model_type"] in WITH_EXPERT_BIAS:
        return dict(FP8_CONFIG)
    return FP8_CONFIG | {"modules_to_not_convert": ["lm_head", *routers]}
