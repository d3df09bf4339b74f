"""The comparison of the rollout phase with bench_serving: its cases, the rows that it sends, its figures."""

import importlib
import sys
from statistics import median
from typing import Any

import pytest

from grpo_devcluster.paths import REPO

sys.path.insert(0, str(REPO / "benchmarks" / "gpu"))

cases: Any = importlib.import_module("rollout_cases")
figures: Any = importlib.import_module("rollout_figures")
baseline: Any = importlib.import_module("serving_baseline")


def test_a_long_tail_has_its_median_and_its_longest_answer() -> None:
    lengths = cases.long_tail(64, 96, 768)
    assert len(lengths) == 64 and max(lengths) == 768 and min(lengths) > 0
    assert median(lengths) == pytest.approx(96, rel=0.05) and sum(lengths) / 64 > 110
    assert list(lengths) != sorted(lengths) and lengths == cases.long_tail(64, 96, 768)


@pytest.mark.parametrize("name", [*cases.GPU_CASES])
def test_prompts_of_a_case_share_no_beginning(name: str) -> None:
    case = cases.GPU_CASES[name]
    texts = case.texts()
    assert len(texts) == len(case.lengths) and case.tokens == case.samples * sum(case.lengths)
    assert {len(text) for text in texts} == {case.characters}
    assert len({text[:16] for text in texts}) == len(texts)  # a page of the prefix cache


def test_token_ids_take_the_place_of_the_messages() -> None:
    row = baseline._row((5, 6, 7), 32)
    assert row["max_tokens"] == 32 and row["input_ids"] == [5, 6, 7] and row["messages"]


@pytest.mark.parametrize("wrong", [{"completed": 1}, {"total_output_tokens": 47}])
def test_a_run_with_other_lengths_does_not_count(wrong: dict[str, int]) -> None:
    requests = [((1, 2), 16), ((3,), 32)]
    result = {"completed": 2, "total_output_tokens": 48, "duration": 1.5}
    assert baseline._checked(result, requests) == {"tokens": 48, "seconds": 1.5}
    with pytest.raises(RuntimeError, match="of 2 requests with"):
        baseline._checked(result | wrong, requests)


def _rounds(*seconds: float, **more: float) -> list[dict[str, float]]:
    return [{"tokens": 100, "seconds": one, "engine_cpu_seconds": one} | more for one in seconds]


def test_ratios_are_of_medians_and_the_worst_round_counts_alone() -> None:
    found = figures.case_figures(
        {
            "ours": _rounds(1.0, 2.0, 1.0, controller_cpu_seconds=0.25),
            "plain": _rounds(1.0, 4.0, 1.25),
            "whole answers": _rounds(0.5),
        }
    )
    assert found["tokens_per_second ours"] == 100 and found["tokens_per_second plain"] == 80
    assert found["ratio plain"] == 1.25 and found["ratio whole answers"] == 0.5
    assert found["ratio_worst"] == 50 / 80 and found["controller_cpu_share"] == 0.75 / 4
    assert found["cpu_ratio plain"] == 1.0 and found["cpu_ratio whole answers"] == 0.4


def test_the_figures_are_those_of_the_worst_case() -> None:
    others = {"plain": _rounds(1.0), "whole answers": _rounds(1.0)}
    measured = {
        name: {"figures": figures.case_figures({"ours": ours, **others})}
        for name, ours in (
            ("a", _rounds(1.0, controller_cpu_seconds=0.0)),
            ("b", _rounds(2.0, controller_cpu_seconds=0.0)),
        )
    }
    assert set(figures.figures(measured).values()) == {0.5}
    assert set(figures.cpu_figures(measured).values()) == {0.5}
