"""Functions that run on ranks: jobs that start from a checkpoint of another job."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.checkpointing.store import complete
from grpo_worker.megatron.optim.optimizer import Trainable, schedule_of
from grpo_worker.model_files.config import model_config
from support.ranks.policy_cases import (
    checkpointer,
    make_model,
    train,
    whole_weights,
)


def source(root: str, layout: dict[str, int]) -> dict[str, Any]:
    """Train two steps and save a checkpoint; return its weights and the two steps after it."""
    policy = make_model(model_config("preset:tiny-moe"), layout)
    train(policy, range(2))
    saver = checkpointer(root, policy)
    saver.save(2, {})
    saver.poll(blocking=True)
    weights = whole_weights(policy)
    history = train(policy, range(2, 4))
    return {"weights": weights, "history": history, "after": whole_weights(policy)}


def fork(root: str, layout: dict[str, int], lr: float = 1e-3) -> dict[str, Any]:
    """Start from the only checkpoint in ``root``; return its weights and the two steps after it."""
    policy = make_model(model_config("preset:tiny-moe"), layout, lr)
    (path,) = complete(Path(root)).values()
    checkpointer(root, policy).load(path)
    weights = whole_weights(policy)
    history = train(policy, range(2, 4))
    return {"weights": weights, "history": history, "after": whole_weights(policy)}


def rates(saved: dict[str, Any], loaded: dict[str, Any], steps: int) -> dict[str, float]:
    """Return learning rate and weight decay after ``steps``, restored by a job with other fields.

    ``saved``, ``loaded``: fields of the optimizer, and ``total`` steps, of the two jobs.
    """
    before, after = _state(saved), _state(loaded)
    before.schedule.step(steps)
    after.schedule.step(1)
    Trainable.restore_schedule(after, before.schedule.state_dict())
    (group,) = after.optimizer.param_groups
    return {"lr": group["lr"], "weight_decay": group["weight_decay"], "steps": after.schedule.num_steps}


def _state(fields: dict[str, Any]) -> Any:
    total = fields.pop("total")
    optimizer = SimpleNamespace(param_groups=[{"params": [torch.zeros(1)]}])
    return SimpleNamespace(
        optimizer=optimizer, schedule=schedule_of(optimizer, OptimizerSpec(**fields), total)
    )
