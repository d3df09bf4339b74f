"""Functions that run on ranks: optimizer steps one right after the other, with and without overlap."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.offload import OffloadSpec
from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.megatron.conversion.readers import SeededWeights
from grpo_worker.megatron.deterministic import require_deterministic
from grpo_worker.megatron.model.build import initialize_parallel
from grpo_worker.megatron.optim import data_parallel
from grpo_worker.megatron.training.policy import PolicyModel
from grpo_worker.megatron.training.runner import MicroBatching
from grpo_worker.megatron.training.setup import ModelSetup
from support.ranks.policy_cases import SEED, batch, own_part, own_rows, update, whole_weights
from support.recompute import recompute_of
from support.tiny_models import tiny_model


def updates(
    layout: dict[str, int],
    overlap: bool,
    shard: int,
    *,
    model: str = "deepseek_v3",
    offloads: bool = False,
    recompute: str = "none",
    mtp: bool = False,
    length: int = 32,
    uneven: bool = False,
    deterministic: bool = False,
    check: bool = False,
) -> dict[str, Any]:
    """Take three optimizer steps of several micro-batches each.

    ``shard``: elements of a bucket that a rank keeps. ``length``: tokens of a row, which is a micro-batch.
    ``uneven``: rows are packed, and the last data-parallel rank has one row, so that micro-batches are empty.
    ``deterministic``: as with spec.trainer.deterministic. ``check``: compute each gradient twice.
    Returns the steps' metrics, the log-probabilities of the last weights, these weights, and how many buckets
    and unfinished gathers there were at the end.
    """
    data_parallel.OVERLAP, data_parallel.SHARD = overlap, shard
    if deterministic:
        require_deterministic()
    policy = _policy(layout, model, offloads, recompute, mtp, length if uneven else None, deterministic)
    assert policy.chunks[0].config.deterministic_mode is deterministic
    last = parallel_state.get_data_parallel_world_size() - 1
    rows = 1 if uneven and parallel_state.get_data_parallel_rank() == last else None
    history = []
    for step in range(3):
        data = {name: part[:rows] for name, part in own_rows(batch(step, length=length)).items()}
        zeros = torch.zeros_like(data["advantages"])
        columns = data | {"old_log_probs": zeros - 4.0, "ref_log_prob": zeros - 4.1}
        history.append(update(policy, columns, check=check))
    groups = [
        group
        for ddp in policy.trainable.ddp
        for group in (*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups)
    ]
    pending = sum(group.param_gather_handle is not None for group in groups)
    weights = whole_weights(policy)
    after = policy.log_probs(own_part(policy, own_rows(batch(3))), 1.0)
    return {
        "history": history,
        "weights": weights,
        "after": after,
        "buckets": len(groups),
        "pending": pending,
    }


def _policy(
    layout: dict[str, int], model: str, offloads: bool, recompute: str, mtp: bool, max_tokens: int | None,
    deterministic: bool,
) -> PolicyModel:  # fmt: skip
    hf = tiny_model(model) | ({"num_nextn_predict_layers": 1} if mtp else {})
    parallel = Layout(world=dist.get_world_size(), **layout)
    initialize_parallel(parallel, SEED)
    offload = OffloadSpec(parameters=offloads, gradients=offloads, optimizer=offloads)
    setup = ModelSetup(
        hf, parallel, SeededWeights(hf, SEED), MicroBatching(1, max_tokens), offload=offload,
        recompute=recompute_of(recompute), mtp=mtp, deterministic=deterministic,
    )  # fmt: skip
    # Without clipping: the norm's last bits depend on the buckets.
    optimizer = OptimizerSpec(lr=1e-3, clip_grad=1000)
    return PolicyModel(setup, optimizer, 100, with_reference=False)
