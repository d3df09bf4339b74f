"""spec.trainer.gradientCheck on gloo ranks: it finds one wrong bit, and changes none itself."""

from typing import Any

import pytest
import torch

from support.ranks.launcher import run as run_on_ranks

TP2_EP2 = {"tensor": 2, "expert": 2, "expert_tensor": 1}
UPDATES: dict[str, Any] = {"overlap": False, "shard": 2000}


@pytest.mark.parametrize(
    ("ranks", "layout", "fields"),
    [
        pytest.param(2, {}, {}, id="dp2-expert-bias"),
        pytest.param(2, {}, {"mtp": True, "recompute": "full"}, id="dp2-recompute-mtp"),
        pytest.param(2, {"expert": 2}, {"offloads": True}, id="ep2-offload"),
        pytest.param(4, TP2_EP2, {"model": "qwen3_moe"}, id="tp2-ep2-dp2"),
        pytest.param(4, {"pipeline": 2, "virtual_pipeline": 2}, {}, id="vpp2-dp2"),
    ],
)
def test_gradients_that_are_computed_twice_change_no_bit(
    ranks: int, layout: dict[str, int], fields: dict[str, Any]
) -> None:
    plain, checked = (
        run_on_ranks("overlap_cases:updates", ranks, layout=layout, check=check, **UPDATES, **fields)
        for check in (False, True)
    )
    for expected, found in zip(plain, checked, strict=True):
        assert found["history"] == expected["history"], "metrics, those of the routers too"
        assert found["weights"].keys() == expected["weights"].keys()
        assert all(torch.equal(found["weights"][name], value) for name, value in expected["weights"].items())


@pytest.mark.parametrize(
    ("ranks", "layout", "wrong"),
    [(2, {}, 0), (2, {}, 1), (4, TP2_EP2, 2)],
    ids=["dp2-0", "dp2-1", "tp2-ep2-2"],
)
def test_the_rank_with_one_wrong_bit_is_named(ranks: int, layout: dict[str, int], wrong: int) -> None:
    sound = run_on_ranks("gradient_check_cases:wrong_gradient", ranks, layout=layout, rank=None)
    assert not any(result["raised"] for result in sound)
    found = run_on_ranks("gradient_check_cases:wrong_gradient", ranks, layout=layout, rank=wrong)
    for rank, result in enumerate(found):
        assert result["left"] == 0, "the bit was not flipped"
        if rank == wrong:
            (message,) = result["raised"]
            assert message.startswith(f"trainer ranks [{wrong}] ")
        else:
            assert not result["raised"], "it received what the other rank had computed"
        assert result["metrics"] == sound[rank]["metrics"], "the second passes were right"


def test_a_gradient_that_is_wrong_each_time_is_not_found() -> None:
    found = run_on_ranks("gradient_check_cases:wrong_gradient", 2, layout={}, rank=1, passes=2)
    assert not any(result["raised"] for result in found) and not any(result["left"] for result in found)
