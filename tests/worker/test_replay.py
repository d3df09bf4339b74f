"""Router replay: the trainer uses the given experts in every layout."""

from typing import Any

import pytest
import torch

from support.ranks.compare import largest_gap
from support.ranks.launcher import run as run_on_ranks

LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, Any]]] = {
    "tp2-ep2": (2, {"tensor": 2, "expert": 2}, {}),
    "cp2": (2, {"context": 2}, {}),
    "cp2-packed": (2, {"context": 2}, {"packed": True}),
    "pp2-recompute": (2, {"pipeline": 2}, {"recompute": "full"}),
    "pp2-recomputed-experts": (2, {"pipeline": 2}, {"recompute": "selective:layernorm,moe"}),
    "pp2-recomputed-up-projections": (2, {"pipeline": 2}, {"recompute": "selective:mla_up_proj,mlp"}),
    "pp2-recomputed-layer": (2, {"pipeline": 2}, {"recompute": "full:1"}),
    "pp2-vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}, {}),
    "tp2-pp2-ep2-packed-recompute": (
        4,
        {"tensor": 2, "pipeline": 2, "expert": 2},
        {"packed": True, "recompute": "full"},
    ),
}


@pytest.fixture(scope="module")
def one_rank() -> dict[str, torch.Tensor]:
    return dict(run_on_ranks("fidelity_cases:replayed", 1, model="deepseek_v3", layout={})[0])


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_under_replay_are_equal_in_every_layout(
    name: str, one_rank: dict[str, torch.Tensor]
) -> None:
    world, layout, how = LAYOUTS[name]
    for found in run_on_ranks("fidelity_cases:replayed", world, model="deepseek_v3", layout=layout, **how):
        assert largest_gap(found, one_rank) < (1e-5,)


@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_moe"])
def test_replaying_the_routers_own_choice_changes_nothing(model: str) -> None:
    own, same, other, agreed = run_on_ranks("fidelity_cases:own_choice_replayed", 1, model=model)[0]
    assert torch.allclose(own, same, atol=1e-6)  # the experts' outputs are summed in another order
    assert (own - other).abs().max() > 1e-3
    assert agreed == 1.0


@pytest.mark.parametrize("name", LAYOUTS)
def test_router_agreement_is_equal_in_every_layout(name: str) -> None:
    world, layout, how = LAYOUTS[name]
    (expected,) = run_on_ranks("fidelity_cases:agreement", 1, layout={})
    assert 0.3 < expected < 0.7, "drawn at random, about half of them agree by chance"
    found = run_on_ranks("fidelity_cases:agreement", world, layout=layout, packed=how.get("packed", False))
    assert found == pytest.approx([expected] * world, abs=1e-3)
