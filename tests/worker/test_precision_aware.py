"""Narrower gradients and optimizer state, with a stand-in for Transformer Engine's Adam, on gloo ranks."""

from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks.launcher import run as run_on_ranks

MOMENTS = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
EVERYTHING = MOMENTS | {"main_grads_dtype": "bf16"}
EP2 = {"expert": 2}


def _saved(
    root: Path, layout: dict[str, int], dtypes: dict[str, str], offloads: bool = False
) -> list[dict[str, Any]]:
    fields: dict[str, Any] = {"layout": layout, "dtypes": dtypes, "offloads": offloads}
    return run_on_ranks("precision_cases:saved", 2, root=str(root), **fields)


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize("layout", [EP2, {"pipeline": 2}, {}], ids=str)
def test_a_checkpoint_and_a_snapshot_resume_bitwise(
    layout: dict[str, int], offloads: bool, tmp_path: Path
) -> None:
    for rank in _saved(tmp_path, layout, EVERYTHING, offloads):
        assert all(
            torch.equal(mine, other) for mine, other in zip(rank["loaded"], rank["state"], strict=True)
        )
        assert rank["again"] == [rank["history"]] * 2, "from a checkpoint, and from a snapshot"
        assert all(torch.equal(rank["resumed"][name], t) for name, t in rank["weights"].items())
        assert rank["kept"] == {
            "exp_avg torch.bfloat16", "exp_avg_sq torch.bfloat16", "master_param torch.int16",
            "gradients torch.bfloat16",
        }  # fmt: skip


@pytest.mark.parametrize(("before", "after"), [({}, MOMENTS), (MOMENTS, {})], ids=["narrower", "wider"])
def test_a_checkpoint_loads_into_other_dtypes(
    before: dict[str, str], after: dict[str, str], tmp_path: Path
) -> None:
    saved = _saved(tmp_path, EP2, before)
    found = run_on_ranks("precision_cases:loaded", 2, root=str(tmp_path), layout=EP2, dtypes=after)
    for mine, other in zip(found, saved, strict=True):
        for number, (values, expected) in enumerate(zip(mine["state"], other["state"], strict=True)):
            if number % 3:  # a moment
                assert torch.equal(values, expected.bfloat16().float())
            else:
                assert _last_bits(values, expected) <= 1, "halfway between two bf16 values"
        assert mine["history"][0]["actor/loss"] == other["history"][0]["actor/loss"], "the same weights"


def _last_bits(values: torch.Tensor, expected: torch.Tensor) -> int:
    """Return the largest difference of fp32 values, in units of their last places."""
    return int((values.view(torch.int32) - expected.view(torch.int32)).abs().max())


def test_ranks_without_transformer_engine_refuse_narrower_state() -> None:
    (message,) = run_on_ranks("precision_cases:refused", 1)
    assert message == (
        "spec.trainer.precisionAwareOptimizer.expAvgDtype=bf16 needs Transformer Engine's FusedAdam: use an "
        "image that has it, or set it to fp32"
    )
