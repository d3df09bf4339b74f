"""Conversion of a checkpoint's optimizer state between layouts."""

from typing import Any


def adapted(loaded: dict[Any, Any], optimizer: Any) -> dict[Any, Any]:
    """Return optimizer state of another layout in the structure that ``optimizer`` expects.

    With expert parallelism Megatron-Core chains two optimizers (dense weights and experts), otherwise it has
    one. The tensors of a ``fully_reshardable`` checkpoint fit both cases. The parameter groups do not: they
    are taken from ``optimizer``, with the saved step and learning rate.
    """
    targets = getattr(optimizer, "chained_optimizers", [optimizer])
    sources = [loaded] if "optimizer" in loaded else _numbered(loaded)
    if len(sources) == len(targets):
        return loaded
    saved = sources[0]["optimizer"]["param_groups"][0]
    kind = sources[0]["param_state_sharding_type"]
    parts = []
    for number, target in enumerate(targets):
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"step": saved["step"], "lr": saved["lr"]}
            for group in target.optimizer.param_groups
        ]
        # A pipeline stage without experts has no tensors for them.
        state = (loaded if len(targets) == 1 else loaded.get(number, {})).get("param_state", {})
        parts.append(
            {"optimizer": {"param_groups": groups}, "param_state": state, "param_state_sharding_type": kind}
        )
    return parts[0] if len(parts) == 1 else dict(enumerate(parts))


def _numbered(loaded: dict[Any, Any]) -> list[dict[Any, Any]]:
    keys = sorted(key for key in loaded if isinstance(key, int) and "optimizer" in loaded[key])
    return [loaded[key] for key in keys]
