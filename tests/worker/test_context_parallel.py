"""Context-parallel ranks, each of which has its chunks of every row, compute what one rank computes."""

from typing import Any

import numpy as np
import pytest

from support.ranks.compare import largest_gap
from support.ranks.launcher import run as run_on_ranks

# Algorithms of which a token's loss, or its weight, depends on its whole row.
CASES: dict[str, dict[str, Any]] = {
    "token-mean": {"lossAggMode": "token-mean", "entropyCoef": 0.01},
    "seq-mean-token-mean": {"lossAggMode": "seq-mean-token-mean"},
    "seq-mean-token-sum": {"lossAggMode": "seq-mean-token-sum"},
    "seq-mean-token-sum-norm": {"lossAggMode": "seq-mean-token-sum-norm"},
    "gspo": {"lossAggMode": "seq-mean-token-mean", "policyLoss": "gspo", "clipRatioLow": 0.05},
    "gspo-entropy": {"lossAggMode": "token-mean", "policyLoss": "gspo", "entropyCoef": 0.01},
    "kl": {"lossAggMode": "token-mean", "useKlLoss": True, "klLossType": "k3"},
}
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "cp2": (2, {"context": 2}),
    "cp4": (4, {"context": 4}),
    "cp2-dp2": (4, {"context": 2}),
    "cp2-pp2": (4, {"context": 2, "pipeline": 2}),
    "tp2-cp2": (4, {"tensor": 2, "context": 2, "expert_tensor": 1, "expert": 2}),
}


@pytest.fixture(scope="module")
def one_rank() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = run_on_ranks("context_cases:steps", 1, layout={}, cases=CASES)[0]
    return found


def test_the_cases_differ(one_rank: dict[str, dict[str, Any]]) -> None:
    losses = [case["metrics"]["actor/loss"] for case in one_rank.values()]
    assert len({round(loss, 6) for loss in losses}) == len(CASES)
    assert one_rank["gspo"]["metrics"]["actor/pg_clipfrac"] > 0


@pytest.mark.parametrize("max_tokens", [None, 40], ids=["padded", "packed"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_equal_those_of_one_rank(
    name: str, max_tokens: int | None, one_rank: dict[str, dict[str, Any]]
) -> None:
    world, layout = LAYOUTS[name]
    chosen: dict[str, Any] = {"layout": layout, "cases": CASES, "max_tokens": max_tokens}
    for rank in run_on_ranks("context_cases:steps", world, **chosen):
        for case, expected in one_rank.items():
            for column, values in expected["columns"].items():
                np.testing.assert_allclose(rank[case]["columns"][column], values, rtol=1e-5, atol=1e-5)
            figures = {key: value for key, value in rank[case]["metrics"].items() if key[:5] == "actor"}
            assert figures == pytest.approx(
                {key: expected["metrics"][key] for key in figures}, rel=1e-5, abs=1e-6
            )
            assert len(figures) == 5
            assert largest_gap(rank[case]["gradients"], expected["gradients"]) < (1e-5,)
