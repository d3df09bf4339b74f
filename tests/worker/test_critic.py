"""PPO's critic: equal in every layout, learns, and resumes with the policy."""

from pathlib import Path

import pytest
import torch

from support.ranks.compare import largest_gap
from support.ranks.launcher import run as run_on_ranks

LAYOUTS = {
    "tp2-ep2": ("deepseek_v3", 2, {"tensor": 2, "expert": 2}, False),
    "cp2": ("deepseek_v3", 2, {"context": 2}, False),
    "pp2-vpp2": ("deepseek_v3", 2, {"pipeline": 2, "virtual_pipeline": 2}, False),
    "dp2-packed": ("deepseek_v3", 2, {}, True),
    "cp2-packed": ("deepseek_v3", 2, {"context": 2}, True),
    "qwen3-tied-tp2-pp2": ("qwen3-tied", 4, {"tensor": 2, "pipeline": 2, "expert_tensor": 2}, True),
}


@pytest.fixture(scope="module")
def one_rank() -> dict[str, dict[str, torch.Tensor]]:
    return {
        model: run_on_ranks("critic_cases:gradients", 1, model=model, layout={})[0]
        for model in ("deepseek_v3", "qwen3-tied")
    }


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_equal_in_every_layout(name: str, one_rank: dict[str, dict[str, torch.Tensor]]) -> None:
    model, world, layout, packed = LAYOUTS[name]
    for found in run_on_ranks("critic_cases:gradients", world, model=model, layout=layout, packed=packed):
        assert "score.weight" in found
        assert largest_gap(found, one_rank[model]) < (1e-5,)


def test_the_critic_learns_values_from_tokens() -> None:
    losses = run_on_ranks("critic_cases:learns", 2, layout={"tensor": 2, "expert": 2}, steps=12)[0]
    assert losses[-1] < 0.5 * losses[0]


def test_policy_critic_and_reference_resume_together(tmp_path: Path) -> None:
    for undisturbed, resumed in run_on_ranks(
        "critic_cases:resumed", 2, root=str(tmp_path), layout={"tensor": 2, "expert": 2}
    ):
        assert resumed == undisturbed
