"""MoE routers: padding moves no expert bias, counts in no figure and has no part in the auxiliary loss."""

from typing import Any

import pytest
import torch

from support.ranks.compare import largest_gap
from support.ranks.launcher import run as run_on_ranks

TP2 = {"tensor": 2, "expert_tensor": 2}
PADDED: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "tp2": (2, TP2),
    "ep2": (2, {"expert": 2}),
    "cp2": (2, {"context": 2}),
    "pp2": (2, {"pipeline": 2}),
    "tp2-pp2-ep2": (4, {"tensor": 2, "pipeline": 2, "expert": 2}),
}
PACKED = {name: PADDED[name] for name in ("one", "tp2", "ep2", "cp2", "tp2-pp2-ep2")}
# Six rows, so that the second micro-batch of four has rows of nothing but padding.
LITTLE, MUCH = {"width": 32, "micro_rows": 2}, {"width": 80, "micro_rows": 4}
# Micro-batches of about the rows' length and much longer ones, which rows of unequal length do not fill.
SHORT, LONG = {"max_tokens": 32}, {"max_tokens": 70}


@pytest.fixture(scope="module")
def by_hand() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = run_on_ranks("router_cases:counted_by_hand", 1)[0]
    assert len(found) == 4, "three MoE layers and the MTP layer"
    return found


def _check(ranks: list[dict[str, Any]], by_hand: dict[str, torch.Tensor]) -> None:
    """Check every router: its tokens, the sign of its biases' change, and its load figure."""
    seen = set()
    for rank in ranks:
        for name, tokens in rank["tokens"].items():
            expected = by_hand[name].float()
            assert tokens.tolist() == expected.tolist(), name
            signs = torch.sign(expected.mean() - expected)
            assert torch.equal(torch.sign(rank["moved"][name]), signs), name
            seen.add(name)
        loads = {f"layer {int(name.rpartition('_')[2]) + 1}": value
                 for name, value in rank["load"].items() if "layer" in name}  # fmt: skip
        ratios = {name: float(n.max() / n.float().mean()) for name, n in by_hand.items() if "layer" in name}
        assert loads == pytest.approx(ratios)
    assert seen == by_hand.keys()


@pytest.mark.parametrize("padding", [LITTLE, MUCH], ids=["little", "much"])
@pytest.mark.parametrize("name", PADDED)
def test_padded_rows_count_their_tokens_only(
    name: str, padding: dict[str, int], by_hand: dict[str, torch.Tensor]
) -> None:
    world, layout = PADDED[name]
    _check(run_on_ranks("router_cases:counted", world, layout=layout, **padding), by_hand)


@pytest.mark.parametrize("budget", [SHORT, LONG], ids=["short", "long"])
@pytest.mark.parametrize("name", PACKED)
def test_packed_rows_count_their_tokens_only(
    name: str, budget: dict[str, int], by_hand: dict[str, torch.Tensor]
) -> None:
    world, layout = PACKED[name]
    _check(run_on_ranks("router_cases:counted", world, layout=layout, **budget), by_hand)


@pytest.mark.parametrize("recompute", ["full", "full:1", "selective:moe", "selective:layernorm,mlp"])
def test_recomputed_layers_count_their_tokens_once(recompute: str, by_hand: dict[str, torch.Tensor]) -> None:
    _check(run_on_ranks("router_cases:counted", 2, layout=TP2, recompute=recompute, **MUCH), by_hand)


def test_a_rate_of_zero_freezes_the_biases() -> None:
    (found,) = run_on_ranks("router_cases:counted", 1, layout={}, rate=0.0)
    assert all(not moved.any() for moved in found["moved"].values())
    (found,) = run_on_ranks("router_cases:counted", 1, layout={}, rate=0.5)
    assert max(moved.max() for moved in found["moved"].values()) == pytest.approx(0.5)


@pytest.mark.parametrize("hf", ["qwen3", "qwen3_moe", "deepseek_v3", "glm4_moe"])
def test_ranks_refuse_a_rate_that_their_model_has_no_use_for(hf: str) -> None:
    (message,) = run_on_ranks("router_cases:refused", 1, hf=hf)
    assert ("spec.trainer.moe.biasUpdateRate=0.01" in message) == hf.startswith("qwen3")


@pytest.fixture(scope="module")
def balanced() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = run_on_ranks("router_cases:gradients", 1, layout={}, coefficient=0.1)[0]
    return found


def test_the_auxiliary_loss_reaches_the_routers(balanced: dict[str, torch.Tensor]) -> None:
    (plain,) = run_on_ranks("router_cases:gradients", 1, layout={}, coefficient=0.0)
    gates = [name for name in plain if name.endswith("gate.weight")]
    assert gates and all((balanced[name] - plain[name]).abs().max() > 1e-4 for name in gates)


@pytest.mark.parametrize("name", PADDED)
def test_the_auxiliary_loss_is_that_of_the_tokens_in_every_layout(
    name: str, balanced: dict[str, torch.Tensor]
) -> None:
    world, layout = PADDED[name]
    for found in run_on_ranks("router_cases:gradients", world, layout=layout, coefficient=0.1, width=80):
        assert largest_gap(found, balanced) < (1e-5,)


@pytest.mark.parametrize(
    ("case", "layout", "idle"),
    [
        ("uneven_shares", {}, [0, 2]),
        ("uneven_shares", {"pipeline": 2}, [0, 2, 0, 2]),
        ("uneven_rounds", {"pipeline": 2, "virtual_pipeline": 2}, [1, 1]),
    ],
)
def test_micro_batches_without_tokens_leave_gradients_finite_and_hold_up_no_stage(
    case: str, layout: dict[str, int], idle: list[int]
) -> None:
    found = run_on_ranks(f"router_cases:gradients_of_{case}", len(idle), layout=layout)
    assert [count for count, _ in found] == idle
    assert all(torch.isfinite(tensor).all() for _, gradient in found for tensor in gradient.values())
