"""Functions that run on ranks: checkpoints of a job, and exports of the same weights."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.checkpointing.exports import EXPORTS
from grpo_worker.checkpointing.restart_point import CHECKPOINTS
from grpo_worker.checkpointing.store import Origin, directory, model_digest
from grpo_worker.common.store_path import JobFolder
from grpo_worker.megatron.checkpoint.checkpointer import Checkpointer
from grpo_worker.megatron.export.config import Quantization
from grpo_worker.megatron.model.build import initialize_parallel
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.megatron.training.runner import MicroBatching
from grpo_worker.megatron.training.setup import ModelSetup
from grpo_worker.model_files.config import model_config
from support.object_store import KEYS
from support.ranks.exports import export
from support.ranks.fidelity_cases import SEED, UnevenBiases
from support.ranks.policy_cases import train

ATTEMPT = 3


def save(
    store: dict[str, Any],
    folder: str,
    model: str,
    layout: dict[str, int],
    mtp: bool,
    formats: list[Quantization],
) -> None:
    """Save checkpoints of steps 1 and 2 in bf16, and export the weights of step 1 in number formats.

    ``model``: directory of the model's files, without weights. The exports are named as if of steps 1, 2, ...
    """
    os.environ.update(KEYS)
    policy, spec = _policy(model, layout, mtp), StoreSpec.model_validate(store)
    root = JobFolder.of(spec, Path(folder)).store
    origin = Origin(model_digest(model_config(model)), str(policy.layout), ATTEMPT)
    checkpoints = Checkpointer(root / CHECKPOINTS, policy.parts(False), 2, origin)
    for step in (1, 2):
        train(policy, range(step - 1, step))
        checkpoints.save(step, {"step": step})
        checkpoints.poll(blocking=True)
        if step == 1:
            for number, quantization in enumerate(formats, 1):
                _export(policy, directory(root / EXPORTS, number), model, quantization)


def _policy(model: str, layout: dict[str, int], mtp: bool) -> PolicyModel:
    hf, parallel = model_config(model), Layout(world=dist.get_world_size(), **layout)
    initialize_parallel(parallel, SEED)
    reader, batching = UnevenBiases(hf, SEED), MicroBatching(4)
    setup = ModelSetup(hf, parallel, reader, batching, dtype=torch.bfloat16, mtp=mtp)
    return PolicyModel(setup, OptimizerSpec(lr=1e-3), 100)


def _export(policy: PolicyModel, target: Any, model: str, quantization: Quantization) -> None:
    export(
        target, model_config(model), policy.chunks, policy.family, Path(model), quantization, attempt=ATTEMPT
    )
