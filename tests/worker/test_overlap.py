"""Collectives beside the passes: the same gradients and weights, on gloo ranks."""

from typing import Any

import numpy as np
import pytest
import torch

from support.ranks.launcher import run as run_on_ranks
from support.ranks.launcher import run_overlapped

# Two ranks share each gradient: the sum of more has other last bits in another bucket.
DP2: tuple[int, dict[str, int]] = 2, {}
EP2 = 2, {"expert": 2}
TP2_EP2 = 4, {"tensor": 2, "expert": 2, "expert_tensor": 1}
PP2 = 4, {"pipeline": 2}
VPP2 = 4, {"pipeline": 2, "virtual_pipeline": 2}
FEW = 2000  # elements of a bucket that a rank keeps: several buckets


def _same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for mine, other in zip(found["history"], expected["history"], strict=True):
        assert mine == pytest.approx(other, rel=1e-6), "the norm of the gradients may differ in its last bits"
        assert mine["actor/loss"] == other["actor/loss"]
    assert all(torch.equal(found["weights"][name], t) for name, t in expected["weights"].items())
    for name, column in expected["after"].items():
        assert np.array_equal(found["after"][name], column)


@pytest.mark.parametrize(
    ("ranks", "fields"),
    [
        pytest.param(DP2, {}, id="dp2"),
        pytest.param(DP2, {"recompute": "full", "mtp": True}, id="dp2-recompute-mtp"),
        pytest.param(DP2, {"model": "qwen3-tied"}, id="dp2-tied"),
        pytest.param(EP2, {}, id="ep2"),
        pytest.param(EP2, {"length": 4}, id="ep2-experts-without-tokens"),
        pytest.param(DP2, {"uneven": True}, id="dp2-micro-batches-without-rows"),
        pytest.param(TP2_EP2, {}, id="tp2-ep2-dp2"),
        pytest.param(PP2, {"mtp": True}, id="pp2-dp2-mtp"),
        pytest.param(PP2, {"model": "qwen3-tied"}, id="pp2-dp2-tied"),
        pytest.param(VPP2, {}, id="vpp2-dp2"),
    ],
)
def test_overlapping_collectives_changes_no_bit(
    ranks: tuple[int, dict[str, int]], fields: dict[str, Any]
) -> None:
    world, layout = ranks
    plain = run_on_ranks("overlap_cases:updates", world, layout=layout, overlap=False, shard=FEW, **fields)
    beside = run_overlapped("overlap_cases:updates", world, layout=layout, overlap=True, shard=FEW, **fields)
    for found, expected in zip(beside, plain, strict=True):
        _same(found, expected)
        assert found["pending"] == found["buckets"] and expected["pending"] == 0
    assert beside[0]["buckets"] > plain[0]["buckets"]


def test_offloaded_weights_are_gathered_before_they_leave() -> None:
    arguments: dict[str, Any] = {"layout": {"expert": 2}, "shard": FEW}
    plain = run_on_ranks("overlap_cases:updates", 2, overlap=False, **arguments)
    away = run_overlapped("overlap_cases:updates", 2, overlap=True, offloads=True, **arguments)
    for found, expected in zip(away, plain, strict=True):
        _same(found, expected)
        assert found["pending"] == 0
