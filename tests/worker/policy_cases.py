"""Functions that run on ranks (started by ranks.py): a tiny policy, its steps, its weights."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_operator.api.layout import Layout
from grpo_operator.api.trainer import OptimizerSpec
from grpo_worker.algorithms.losses import PolicyLossConfig, token_weights
from grpo_worker.megatron import weights
from grpo_worker.megatron.checkpoint import Checkpointer
from grpo_worker.megatron.initialise import weight_reader
from grpo_worker.megatron.model import Batch, PolicyModel, initialize_parallel
from grpo_worker.megatron.presets import model_config
from grpo_worker.weightsync import manifest

SEED = 7


def make(layout: dict[str, int], lr: float = 1e-3, recompute: bool = False) -> PolicyModel:
    hf = model_config("preset:tiny-moe")
    parallel = Layout(world=dist.get_world_size(), **layout)
    initialize_parallel(parallel, SEED)
    read = weight_reader("preset:tiny-moe", hf, SEED)
    return PolicyModel(hf, parallel, OptimizerSpec(lr=lr), 100, read, 8, recompute)


def batch(step: int, rows: int = 8, length: int = 32) -> Batch:
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, 128, (rows, length), generator=generator)
    mask = torch.zeros(rows, length)
    mask[:, length // 2 :] = 1
    advantages = torch.randn(rows, 1, generator=generator).expand(rows, length).contiguous()
    return {"input_ids": ids, "advantages": advantages * mask, "response_mask": mask,
            "weights": token_weights(mask, "token-mean")}  # fmt: skip


def train(policy: PolicyModel, steps: range) -> list[dict[str, float]]:
    history = []
    for step in steps:
        data = batch(step)
        data["old_log_probs"] = policy.log_probs(data, 1.0)
        data["ref_log_prob"] = policy.log_probs(data, 1.0, reference=True)
        history.append(policy.update(data, PolicyLossConfig(), 0.01, 1.0))
    return history


def whole_weights(policy: PolicyModel) -> dict[str, torch.Tensor]:
    """All weights under their Hugging Face names, assembled from every rank's shards."""
    local = [
        (s.name, s.shape, s.dim, s.offset, s.tensor.clone()) for s in weights.shards(policy.module) if s.owner
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local)
    out: dict[str, torch.Tensor] = {}
    for name, shape, dim, offset, tensor in (item for part in gathered for item in part):
        whole = out.setdefault(name, torch.full(shape, float("nan")))
        whole.narrow(dim, offset, tensor.shape[dim]).copy_(tensor)
    return out


def log_probs(layout: dict[str, int]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    policy = make(layout)
    data = batch(0)
    return policy.log_probs(data, 1.0), whole_weights(policy)


def steps(layout: dict[str, int], count: int, recompute: bool = False) -> list[dict[str, float]]:
    return train(make(layout, recompute=recompute), range(count))


def save_and_resume(root: str, layout: dict[str, int]) -> dict[str, Any]:
    """Steps 0-3 with a checkpoint after 1, and steps 2-3 again from that checkpoint."""
    policy = make(layout)
    saver = Checkpointer(root, policy, keep=2)
    train(policy, range(2))
    saver.save(1, {"cursor": 16})
    undisturbed = train(policy, range(2, 4))  # while the checkpoint is being written
    saver.poll(blocking=True)
    expected = whole_weights(policy)
    saver.load(1)
    resumed = train(policy, range(2, 4))
    actual = whole_weights(policy)
    equal = all(torch.equal(expected[name], actual[name]) for name in expected)
    return {"undisturbed": undisturbed, "resumed": resumed, "weights_equal": equal}


def publish(root: str, layout: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Publish version 3 after one step; return log-probs and ids of a batch."""
    policy = make(layout)
    train(policy, range(1))
    parts = [(s.name, s.shape, s.dim, s.offset, s.tensor) for s in weights.shards(policy.module) if s.owner]
    manifest.publish(Path(root), 3, dist.get_rank(), dist.get_world_size(), parts)
    data = batch(5)
    return policy.log_probs(data, 1.0), data["input_ids"]
