"""Functions that run on ranks: a classifier of transformers as the reward model."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForSequenceClassification

from grpo_operator.api.v1alpha1.layout import Layout
from grpo_worker.megatron.conversion.readers import SeededWeights
from grpo_worker.megatron.model.build import initialize_parallel
from grpo_worker.megatron.training.reward_model import RewardModel
from grpo_worker.megatron.training.runner import MicroBatching
from grpo_worker.megatron.training.setup import ModelSetup
from support.padded import ragged
from support.ranks.policy_cases import SEED, batch, cut, on_every_stage, own_rows
from support.tiny_models import tiny_model


def scores(root: str, model: str, layout: dict[str, int], packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return our scores and transformers' of this data-parallel rank's rows."""
    hf, parallel = tiny_model(model), Layout(world=dist.get_world_size(), **layout)
    if dist.get_rank() == 0:
        save_classifier(Path(root), model)
    dist.barrier()
    initialize_parallel(parallel, SEED)
    batching = MicroBatching(4, 80 if packed else None)
    ours = RewardModel(root, ModelSetup(hf, parallel, SeededWeights(hf, SEED), batching))
    data = own_rows({name: column for name, column in batch(3).items() if name[0] in "ia"})
    data["input_ids"] = (data["input_ids"].clamp(min=1)) * data["attention_mask"]  # 0 is the padding
    theirs = AutoModelForSequenceClassification.from_pretrained(root, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = theirs(**data).logits
    found = ours.scores(cut(ragged(data), parallel, packed)).get("scores")
    column = None if found is None else torch.from_numpy(found)[:, None]
    return on_every_stage(column, {"input_ids": expected}), expected


def refusal(root: str, model: str) -> str:
    """Return the error of a reward model that cannot be used."""
    hf = tiny_model(model)
    try:
        RewardModel(root, ModelSetup(hf, Layout(world=1), SeededWeights(hf, SEED)))
    except ValueError as error:
        return str(error)
    return "accepted"


def save_classifier(root: Path, model: str) -> None:
    """Save a random classifier of transformers with one label."""
    root.mkdir()
    (root / "config.json").write_text(json.dumps(tiny_model(model)))
    torch.manual_seed(SEED)
    config = AutoConfig.from_pretrained(root, num_labels=1, pad_token_id=0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(root)
