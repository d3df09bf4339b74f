"""Functions that run on ranks: steps and checkpoints with narrower gradients and optimizer state."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.offload import OffloadSpec
from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_operator.api.v1alpha1.optimizer_dtypes import OptimizerDtypes
from grpo_worker.checkpointing.state_file import read_state, write_state
from grpo_worker.checkpointing.store import Origin, directory
from grpo_worker.megatron.checkpoint import rank_state, snapshot
from grpo_worker.megatron.checkpoint.checkpointer import Checkpointer
from grpo_worker.megatron.conversion.readers import SeededWeights
from grpo_worker.megatron.model.build import initialize_parallel
from grpo_worker.megatron.optim.offload import HostCopies
from grpo_worker.megatron.optim.optimizer import chained_optimizers
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.megatron.training.runner import MicroBatching
from grpo_worker.megatron.training.setup import ModelSetup
from support import fused_adam
from support.ranks.policy_cases import SEED, train, whole_weights
from support.tiny_models import tiny_model


def saved(
    root: str, layout: dict[str, int], dtypes: dict[str, str], offloads: bool = False
) -> dict[str, Any]:
    """Train two steps, save a checkpoint and train one more; repeat that one from checkpoint and snapshot.

    ``offloads``: all state, and the checkpoint is read from host memory.
    """
    policy = _policy(layout, dtypes, offloads)
    train(policy, range(2))
    saver = _saver(root, policy)
    copy = snapshot.capture(policy.parts(False))
    saver.save(1, {}, from_host=offloads)
    state = _state(policy)
    history = train(policy, range(2, 3))
    saver.poll(blocking=True)
    weights = whole_weights(policy)
    saver.load(directory(Path(root), 1))
    loaded = _state(policy)
    again = [train(policy, range(2, 3))]
    write_state(file := Path(root) / f"rank-{dist.get_rank()}.safetensors", copy)
    snapshot.restore(policy.parts(False), read_state(file))
    again.append(train(policy, range(2, 3)))
    return {
        "state": state, "loaded": loaded, "history": history, "again": again, "weights": weights,
        "resumed": whole_weights(policy), "kept": _kept(policy),
    }  # fmt: skip


def loaded(root: str, layout: dict[str, int], dtypes: dict[str, str]) -> dict[str, Any]:
    """Load the checkpoint into a job with other dtypes, and train one step."""
    policy = _policy(layout, dtypes)
    _saver(root, policy).load(directory(Path(root), 1))
    return {"state": _state(policy), "history": train(policy, range(2, 3))}


def refused() -> str:
    """Return why ranks without Transformer Engine do not have the dtypes."""
    try:
        _policy({}, {"exp_avg_dtype": "bf16"}, stand_in=False)
    except ValueError as error:
        return str(error)
    return "accepted"


def _policy(
    layout: dict[str, int], dtypes: dict[str, str], offloads: bool = False, stand_in: bool = True
) -> PolicyModel:
    if dtypes and stand_in:  # else PyTorch's Adam
        fused_adam.install()
    hf, parallel = tiny_model("deepseek_v3"), Layout(world=dist.get_world_size(), **layout)
    initialize_parallel(parallel, SEED)
    setup = ModelSetup(
        hf, parallel, SeededWeights(hf, SEED), MicroBatching(4), torch.bfloat16,
        offload=OffloadSpec(parameters=offloads, gradients=offloads, optimizer=offloads),
        optimizer_dtypes=OptimizerDtypes.model_validate(dtypes),
    )  # fmt: skip
    return PolicyModel(setup, OptimizerSpec(lr=1e-3), 100)


def _saver(root: str, policy: PolicyModel) -> Checkpointer:
    return Checkpointer(root, policy.parts(False), 2, Origin("tiny", str(policy.layout)))


def _state(policy: PolicyModel) -> list[torch.Tensor]:
    """Return this rank's main weights and moments in fp32."""
    with policy.trainable.on_device():
        return [
            rank_state.read(optimizer, parameter, HostCopies({}))[name].clone()
            for optimizer in chained_optimizers(policy.trainable.optimizer)
            for parameter in optimizer.model_param_group_index_map
            for name in rank_state.NAMES
        ]


def _kept(policy: PolicyModel) -> set[str]:
    """Return the dtypes of the state and of the gradients."""
    buffers = policy.trainable.ddp[0].buffers
    inner = chained_optimizers(policy.trainable.optimizer)[0].optimizer
    state = {f"{name} {values.dtype}" for entry in inner.state.values() for name, values in entry.items()}
    return state | {f"gradients {buffer.grad_dtype}" for buffer in buffers}
