"""Megatron-Core's model equals the files' model in every layout: logits, routing, gradients, bits."""

from pathlib import Path

import pytest
import torch

from support.ranks.compare import largest_gap
from support.ranks.launcher import run as run_on_ranks
from support.ranks.layouts import LAYOUTS

EVERY = pytest.mark.parametrize("name", LAYOUTS)
# Sequences packed without padding, on every axis.
PACKED = [
    "deepseek-1", "deepseek-tp2-pp2-ep2", "deepseek-pp2-vpp2", "deepseek-pp2-vpp2-uneven", "qwen3-tp2-pp2",
    "qwen3-moe-tp2-ep2",
    "deepseek-cp2", "deepseek-cp2-pp2", "deepseek-cp2-ep2", "deepseek-tp2-cp2-ep4", "qwen3-moe-cp2-pp2",
    "llama-1", "qwen2-tp2", "glm-1", "kimi-1",
]  # fmt: skip


@EVERY
def test_logits_equal_those_of_transformers_and_files_keep_every_bit(name: str, tmp_path: Path) -> None:
    model, world, layout = LAYOUTS[name]
    found = run_on_ranks(
        "fidelity_cases:against_transformers",
        world,
        root=str(tmp_path / "hf"),
        model=model,
        layout=layout,
    )
    assert all(rank["bitwise"] and rank["reloaded"] for rank in found)
    differences = [rank["difference"] for rank in found if rank["difference"] is not None]
    assert differences and max(differences) < 1e-5


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_do_not_attend_to_each_other(name: str, tmp_path: Path) -> None:
    model, world, layout = LAYOUTS[name]
    found = run_on_ranks(
        "fidelity_cases:against_transformers",
        world,
        root=str(tmp_path / "hf"),
        model=model,
        layout=layout,
        packed=True,
    )
    assert max(rank["difference"] for rank in found if rank["difference"] is not None) < 1e-5


@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_moe", "glm4_moe", "kimi_k2"])
def test_routers_choose_the_same_experts_for_1024_tokens(model: str, tmp_path: Path) -> None:
    (found,) = run_on_ranks("fidelity_cases:routing", 1, root=str(tmp_path / "hf"), model=model)
    assert found["equal"] == [True] * 3
    assert min(found["experts_used"]) > 1, "a router that uses one expert proves nothing"


@pytest.fixture(scope="module")
def one_rank() -> dict[str, dict[str, torch.Tensor]]:
    return {
        model: run_on_ranks("fidelity_cases:gradients", 1, model=model, layout={})[0]
        for model in sorted({model for model, world, _ in LAYOUTS.values() if world > 1})
    }


@pytest.mark.parametrize(
    ("name", "packed"),
    [(n, False) for n, (_, world, _) in LAYOUTS.items() if world > 1] + [(n, True) for n in PACKED],
)
def test_gradients_of_a_grpo_step_are_equal_in_every_layout(
    name: str, packed: bool, one_rank: dict[str, dict[str, torch.Tensor]]
) -> None:
    model, world, layout = LAYOUTS[name]
    for found in run_on_ranks("fidelity_cases:gradients", world, model=model, layout=layout, packed=packed):
        assert largest_gap(found, one_rank[model]) < (1e-5,)
