"""Configuration of a run as trackers of experiments keep it."""

from typing import Any

from grpo_operator import __version__
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_worker.common.versions import installed

_LEFT_OUT = ("podTemplate",)  # may have credentials in its environment


def run_config(spec: GRPOJobSpec, rollout_gpus: int = 0) -> dict[str, Any]:
    """Return the spec with all defaults, as in the manifest, without templates of pods.

    Beside its fields are ``layout``, what follows from the parallel sizes, and ``versions``, those of this
    process's image. ``rollout_gpus``: of all engines, unless they share those of the trainers.
    """
    layout = spec.trainer.parallelism.layout(spec.trainer.world)
    return {
        **_kept(spec.wire()),
        "layout": {
            "trainerGpus": layout.world,
            "rolloutGpus": rollout_gpus,
            "data": layout.data,
            "expertData": layout.expert_data,
        },
        "versions": {"grpo_operator": __version__, **installed().wire()},
    }


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
