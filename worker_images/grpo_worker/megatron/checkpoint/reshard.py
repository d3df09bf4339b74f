"""Conversion of a checkpoint's optimizer state between layouts and between kinds of Adam."""

from typing import Any

from grpo_worker.megatron.optim.adam import saved_fields
from grpo_worker.megatron.optim.optimizer import chained_optimizers


def adapted(loaded: dict[Any, Any], optimizer: Any) -> dict[Any, Any]:
    """Return loaded optimizer state in the structure that ``optimizer`` expects.

    With expert parallelism Megatron-Core chains two optimizers (dense weights and experts), otherwise it has
    one. The tensors of a ``fully_reshardable`` checkpoint fit both cases. The parameter groups do not, and
    torch's Adam and Transformer Engine's have different fields in them: they are taken from ``optimizer``,
    with the saved step and learning rate.
    """
    targets = chained_optimizers(optimizer)
    sources = [loaded] if "optimizer" in loaded else _numbered(loaded)
    fields = saved_fields(group for source in sources for group in source["optimizer"]["param_groups"])
    kind = sources[0]["param_state_sharding_type"]
    parts = []
    for number, target in enumerate(targets):
        groups = [
            {key: value for key, value in group.items() if key != "params"} | fields
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
