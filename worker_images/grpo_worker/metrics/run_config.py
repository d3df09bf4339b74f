"""Configuration of a run as trackers of experiments keep it."""

from typing import Any

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec

_LEFT_OUT = ("podTemplate",)  # may have credentials in its environment


def run_config(spec: GRPOJobSpec) -> dict[str, Any]:
    """Return the spec with all defaults, as in the manifest, without templates of pods."""
    return dict(_kept(spec.wire()))


def flattened(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return the values by their paths, as in ``trainer.optimizer.lr``; lists are one value."""
    found: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            found |= flattened(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = str(value)
    return found


def _kept(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _kept(inner) for name, inner in value.items() if name not in _LEFT_OUT}
    return value
