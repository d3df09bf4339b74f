"""Functions that run on ranks: checkpoints in an object store.

``keys``: what they have in the environment for it.
"""

import os
from pathlib import Path
from typing import Any

from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.checkpointing.exports import EXPORTS
from grpo_worker.checkpointing.store import DamagedCheckpointError, Origin, complete, directory
from grpo_worker.common import object_stream
from grpo_worker.common.rank_errors import ExportError
from grpo_worker.common.store_path import JobFolder
from grpo_worker.megatron.checkpoint.checkpointer import Checkpointer
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.model_files.config import model_config
from support.ranks.exports import export
from support.ranks.policy_cases import make_model, train, whole_weights

_PART = 5 << 20  # the smallest that S3 takes
_HF = model_config("preset:tiny-moe") | {"vocab_size": 30_000}


def save(
    store: dict[str, Any], folder: str, layout: dict[str, int], keys: dict[str, str], first: int = 1
) -> dict[str, Any]:
    """Train from step ``first`` to 2 and save each step; return two further steps and the weights before."""
    object_stream.PART = _PART
    os.environ.update(keys)
    policy = _make(layout)
    saver = _checkpointer(store, folder, policy)
    train(policy, range(first - 1))
    for step in range(first, 3):
        train(policy, range(step - 1, step))
        saver.save(step, {"step": step})
        saver.poll(blocking=True)
    weights = whole_weights(policy)
    return {"weights": weights, "steps": train(policy, range(2, 4))}


def resume(
    store: dict[str, Any], folder: str, layout: dict[str, int], keys: dict[str, str]
) -> dict[str, Any]:
    """Return the same of a gang that starts from the newest checkpoint, or why it cannot load it."""
    os.environ.update(keys)
    policy = _make(layout)
    loader = _checkpointer(store, folder, policy)
    newest = complete(loader.root)[2]
    try:
        loader.load(newest)
    except DamagedCheckpointError as error:
        return {"error": str(error)}
    return {"weights": whole_weights(policy), "steps": train(policy, range(2, 4))}


def export_weights(
    store: dict[str, Any], folder: str, layout: dict[str, int], keys: dict[str, str], attempt: int
) -> str:
    """Export a model as that of step 1 by an attempt; return the error, or ""."""
    os.environ.update(keys)
    object_stream.PART = _PART
    policy, spec = _make(layout), StoreSpec.model_validate(store)
    root = JobFolder.of(spec, Path(spec.path or "/store", folder)).store / EXPORTS
    try:
        export(directory(root, 1), _HF, policy.chunks, policy.family, attempt=attempt)
    except ExportError as error:
        return str(error)
    return ""


def _make(layout: dict[str, int]) -> PolicyModel:
    """Return a model whose files have several parts."""
    return make_model(_HF, layout)


def _checkpointer(store: dict[str, Any], folder: str, policy: PolicyModel) -> Checkpointer:
    spec = StoreSpec.model_validate(store)
    root = JobFolder.of(spec, Path(spec.path or "/store", folder)).store / "checkpoints"
    return Checkpointer(root, policy.parts(False), 2, Origin("tiny", str(policy.layout)))
