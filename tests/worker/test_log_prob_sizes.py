"""Passes without gradients take more tokens at a time than those of the update, and compute the same.

Larger products add in another order, so that log-probs are equal within fp32's rounding, not bitwise.
"""

from typing import Any

import numpy as np
import pytest

from support.ranks.launcher import run as run_on_ranks

PADDED, PACKED = {"rows": 1}, {"max_tokens": 40}
MORE_ROWS, MORE_TOKENS = {"log_prob_rows": 4}, {"log_prob_max_tokens": 300}
CASES: dict[str, tuple[int, dict[str, int], dict[str, int], dict[str, int]]] = {
    "one-padded": (1, {}, PADDED, MORE_ROWS),
    "one-packed": (1, {}, PACKED, MORE_TOKENS),
    "dp2-packed": (2, {}, PACKED, MORE_TOKENS),
    "tp2-ep2-packed": (2, {"tensor": 2, "expert": 2}, PACKED, MORE_TOKENS),
    "cp2-padded": (2, {"context": 2}, PADDED, MORE_ROWS),
    "cp2-packed": (2, {"context": 2}, {"max_tokens": 20}, {"log_prob_max_tokens": 150}),
    "pp2-vpp2-padded": (2, {"pipeline": 2, "virtual_pipeline": 2}, PADDED, MORE_ROWS),
    "pp2-vpp2-packed": (2, {"pipeline": 2, "virtual_pipeline": 2}, PACKED, MORE_TOKENS),
}


@pytest.mark.parametrize("model", ["deepseek_v3", "qwen3"])
@pytest.mark.parametrize("name", CASES)
def test_larger_passes_compute_the_same_in_fewer(name: str, model: str) -> None:
    world, layout, small, more = CASES[name]
    if model == "qwen3" and "expert" in layout:
        layout = {"tensor": layout["tensor"]}
    plain = run_on_ranks("log_prob_cases:outcome", world, model=model, layout=layout, sizes=small)
    for found, before in zip(
        run_on_ranks("log_prob_cases:outcome", world, model=model, layout=layout, sizes=small | more),
        plain,
        strict=True,
    ):
        for column in ("log_probs", "reference", "values"):
            (values, passes), (expected, more_passes) = found[column], before[column]
            np.testing.assert_allclose(values, expected, rtol=0, atol=3e-6)
            assert 2 * passes <= more_passes, column
        assert found["update"] == before["update"], "the update keeps its own size, bitwise"


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        ({"max_tokens": 20}, "trainer.maxTokensPerGpu is 20: raise it"),
        ({"max_tokens": 40, "log_prob_max_tokens": 20}, "trainer.logProbMaxTokensPerGpu is 20: raise it"),
    ],
)
def test_a_sequence_that_is_too_long_names_the_field(sizes: dict[str, Any], text: str) -> None:
    (problem,) = run_on_ranks("log_prob_cases:refusal", 1, layout={}, sizes=sizes)
    assert text in problem
