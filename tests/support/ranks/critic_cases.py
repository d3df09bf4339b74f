"""Functions that run on ranks: a tiny critic, its gradients and its steps."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_operator.api.v1alpha1.optimizer import OptimizerSpec
from grpo_worker.checkpointing.store import Origin, directory
from grpo_worker.data.micro_batch import Batch
from grpo_worker.megatron.checkpoint.checkpointer import Checkpointer
from grpo_worker.megatron.checkpoint.part import CheckpointPart
from grpo_worker.megatron.conversion import hf_mapping
from grpo_worker.megatron.conversion.readers import SeededWeights
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.megatron.model.build import initialize_parallel
from grpo_worker.megatron.training.critic import CriticModel
from grpo_worker.megatron.training.runner import MicroBatching
from grpo_worker.megatron.training.setup import ModelSetup
from support.padded import padded_tokens, ragged
from support.ranks.fidelity_cases import keep_gradients
from support.ranks.policy_cases import (
    SEED,
    assembled,
    batch,
    cut,
    make_model,
    on_every_rank,
    own_rows,
    train,
)
from support.tiny_models import tiny_model


class WithScores(SeededWeights):
    """A value head that is not zero, so that the gradient reaches every layer."""

    def shape(self, name: str) -> tuple[int, ...]:
        return (1, 64) if name == "score.weight" else super().shape(name)

    def read(self, name: str, dim: int, offset: int, length: int) -> torch.Tensor:
        if name == "score.weight":
            return torch.linspace(-0.5, 0.5, 64)[None]
        return super().read(name, dim, offset, length)


def _critic(model: str, layout: dict[str, int], packed: bool, initialised: bool = False) -> CriticModel:
    hf, parallel = tiny_model(model), Layout(world=dist.get_world_size(), **layout)
    if not initialised:
        initialize_parallel(parallel, SEED)
    batching = MicroBatching(4, 80 if packed else None)
    return CriticModel(ModelSetup(hf, parallel, WithScores(hf, SEED), batching), OptimizerSpec(lr=1e-3), 100)


def _data(critic: CriticModel, step: int) -> Batch:
    data = own_rows(batch(step))
    rows = cut(ragged(data), critic.layout, critic._runner.packs)
    found = critic.values(rows).get("values")
    data["values"] = on_every_rank(None if found is None else padded_tokens(found, rows), data)
    data["returns"] = data["response_mask"] * (data["input_ids"] % 7) / 7
    return data


def gradients(model: str, layout: dict[str, int], packed: bool = False) -> dict[str, torch.Tensor]:
    """Return values of a batch, and the gradient of one step under Hugging Face names."""
    critic = _critic(model, layout, packed)
    data = _data(critic, 0)
    critic.trainable.step = lambda: keep_gradients(critic)  # type: ignore[method-assign]
    critic.update(cut(ragged(data), critic.layout, critic._runner.packs), 0.5)
    return assembled(hf_mapping.shards(critic.trainable.chunks, family_of(tiny_model(model))))


def learns(layout: dict[str, int], steps: int) -> list[float]:
    """Return the losses of a critic that trains on the same batch repeatedly."""
    critic = _critic("deepseek_v3", layout, packed=False)
    return [critic.update(ragged(_data(critic, 0)), 10.0)["critic/vf_loss"] for _ in range(steps)]


def resumed(root: str, layout: dict[str, int]) -> list[dict[str, Any]]:
    """Return steps of policy and critic after a checkpoint of both: undisturbed, and resumed from it."""
    policy = make_model(tiny_model("deepseek_v3"), layout)
    critic = _critic("deepseek_v3", layout, packed=False, initialised=True)
    parts = [*policy.parts(True), CheckpointPart("critic.", critic.trainable.chunks, critic.trainable)]
    saver = Checkpointer(root, parts, 2, Origin("tiny", str(policy.layout)))

    def step(number: int) -> dict[str, Any]:
        metrics = (
            critic.update(ragged(_data(critic, number)), 0.5) | train(policy, range(number, number + 1))[0]
        )
        policy.refresh_reference()
        return metrics

    step(0)
    saver.save(1, {})
    saver.poll(blocking=True)
    undisturbed = step(1)
    saver.load(directory(Path(root), 1))
    return [undisturbed, step(1)]
