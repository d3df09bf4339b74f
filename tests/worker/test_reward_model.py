"""Scores of a reward model equal transformers' in every layout; unsuitable models are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from support.ranks.launcher import run as run_on_ranks
from support.tiny_models import tiny_model

CASES = {
    "deepseek-1-packed": ("deepseek_v3", 1, {}, True),
    "deepseek-tp2-pp2-ep2": ("deepseek_v3", 4, {"tensor": 2, "pipeline": 2, "expert": 2}, False),
    "qwen3-cp2": ("qwen3", 2, {"context": 2}, False),
    "qwen3-cp2-packed": ("qwen3", 2, {"context": 2}, True),
    "qwen3-dp2-packed": ("qwen3-tied", 2, {}, True),
}


@pytest.mark.parametrize("name", CASES)
def test_scores_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    model, world, layout, packed = CASES[name]
    found = run_on_ranks(
        "reward_cases:scores",
        world,
        root=str(tmp_path / "judge"),
        model=model,
        layout=layout,
        packed=packed,
    )
    for ours, theirs in found:
        assert ours.shape == theirs.shape and theirs.std() > 1e-3
        assert torch.allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("vocabulary", "head", "message"),
    [
        (256, {"score.weight": torch.zeros(1, 64)}, "vocabulary has 256 tokens, the policy's 128"),
        (
            128,
            {"lm_head.weight": torch.zeros(128, 64)},
            "there is no tensor score.weight: use a sequence classifier",
        ),
        (128, {"score.weight": torch.zeros(5, 64)}, "the classifier has 5 labels: use one with one label"),
    ],
)
def test_an_unsuitable_reward_model_is_refused(
    vocabulary: int, head: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    policy = tiny_model("qwen3")
    (tmp_path / "config.json").write_text(json.dumps(policy | {"vocab_size": vocabulary}))
    save_file(head, tmp_path / "model.safetensors")
    (found,) = run_on_ranks("reward_cases:refusal", 1, root=str(tmp_path), model="qwen3")
    assert message in found
