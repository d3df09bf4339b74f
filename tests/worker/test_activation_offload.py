"""Activations in host memory: they change no gradient, in any schedule and number of micro-batches."""

from functools import cache
from typing import Any

import pytest
import torch

from support.ranks.compare import largest_gap
from support.ranks.launcher import run as run_on_ranks
from support.tiny_models import tiny_model

LAYOUTS: dict[str, tuple[int, dict[str, int], bool]] = {
    "one": (1, {}, False),
    "tp2-ep2-packed": (2, {"tensor": 2, "expert": 2}, True),
    "pp2-packed": (2, {"pipeline": 2}, True),
    "pp2-vpp2": (2, {"pipeline": 2, "virtual_pipeline": 2}, False),
}
ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
NORMS = ("attn_norm", "mlp_norm")


@cache
def _updates(
    model: str, layout: str, modules: tuple[str, ...], recompute: str = "none", mtp: bool = False
) -> list[tuple[list[dict[str, torch.Tensor]], list[int]]]:
    world, sizes, packed = LAYOUTS[layout]
    hf: dict[str, Any] = tiny_model(model) | ({"num_nextn_predict_layers": 1} if mtp else {})
    return run_on_ranks(
        "offload_cases:updates", world, model=hf, layout=sizes, modules=list(modules), packed=packed,
        recompute=recompute, mtp=mtp,
    )  # fmt: skip


def _different(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    assert left.keys() == right.keys() and left
    return [name for name in left if not torch.equal(left[name], right[name])]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3_moe"])
def test_offloaded_attention_changes_no_bit_of_a_gradient(model: str, layout: str) -> None:
    kept, offloaded = (_updates(model, layout, modules) for modules in ((), ATTENTION))
    for plain, moved in zip(kept, offloaded, strict=True):
        for left, right in zip(plain[0], moved[0], strict=True):
            assert _different(left, right) == []
        assert plain[1] == [0, 0, 0]
        assert moved[1][2] > moved[1][0] > moved[1][1] > 0, "as many as there are rows"


@pytest.mark.parametrize("recompute", ["none", "selective:layernorm,mla_up_proj"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_offloaded_norms_change_rounding_only(layout: str, recompute: str) -> None:
    # PyTorch's RMS norm on a CPU is several operations: their gradients add up before the residual's joins.
    kept, offloaded = (_updates("deepseek_v3", layout, modules, recompute) for modules in ((), NORMS))
    for plain, moved in zip(kept, offloaded, strict=True):
        for left, right in zip(plain[0], moved[0], strict=True):
            assert largest_gap(left, right) < (1e-5,)
        assert min(moved[1]) > 0


def test_the_layer_of_multi_token_prediction_offloads_too() -> None:
    kept, moved = (_updates("deepseek_v3", "pp2-packed", modules, mtp=True) for modules in ((), ATTENTION))
    without = _updates("deepseek_v3", "pp2-packed", ATTENTION)
    for rank in (0, 1):
        for left, right in zip(kept[rank][0], moved[rank][0], strict=True):
            assert _different(left, right) == []
    assert moved[0][1] == without[0][1] and moved[1][1][0] > without[1][1][0], "on the last stage"


def test_ranks_without_transformer_engine_refuse() -> None:
    (text,) = run_on_ranks("offload_cases:refused", 1, modules=["attn_norm"])
    assert text.startswith("spec.trainer.offload.activations=[attn_norm]: these ranks compute without")
    assert text.endswith("or remove activations")


def test_a_part_that_is_too_small_to_be_copied_outlives_the_whole() -> None:
    assert run_on_ranks("offload_cases:small_part", 1, size=64, part=8) == [True]
