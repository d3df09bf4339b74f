"""Data and figures of the benchmark of precision: pure parts."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_devcluster import results
from grpo_devcluster.paths import REPO

sys.path[:0] = [str(REPO / "benchmarks"), str(REPO / "benchmarks" / "gpu")]

data: Any = importlib.import_module("precision_data")
figures: Any = importlib.import_module("precision_figures")


def test_sequences_follow_the_chain_with_its_chances() -> None:
    tokens = data.Chain(8, 3).sequences(2000, 50, 1)
    seen: dict[tuple[int, int], dict[int, int]] = {}
    for before, last, after in zip(
        tokens[:, :-2].flat, tokens[:, 1:-1].flat, tokens[:, 2:].flat, strict=True
    ):
        counts = seen.setdefault((before % 2, last), {})
        counts[after] = counts.get(after, 0) + 1
    assert len(seen) == 16, "a parity or a token never came"
    assert all(len(counts) <= len(data.CHANCES) for counts in seen.values())
    distinct = [counts for counts in seen.values() if len(counts) == len(data.CHANCES)]
    assert distinct, "in every state two of the next tokens coincide"
    for counts in distinct:
        shares = sorted((count / sum(counts.values()) for count in counts.values()), reverse=True)
        assert shares == pytest.approx(data.CHANCES, abs=0.04)
    assert any(seen[0, last].keys() != seen[1, last].keys() for last in range(8))


def test_a_seed_gives_the_same_sequences_and_another_one_others() -> None:
    chain = data.Chain(512, 3)
    first = chain.sequences(4, 32, 1)
    assert np.array_equal(first, data.Chain(512, 3).sequences(4, 32, 1))
    assert not np.array_equal(first, chain.sequences(4, 32, 2))
    assert first.min() >= 0 and first.max() < 512


def test_the_smallest_loss_is_the_entropy_of_the_chances() -> None:
    assert data.Chain(16, 3).entropy == pytest.approx(1.208, abs=1e-3)


def test_a_batch_weighs_all_response_tokens_equally() -> None:
    tokens = np.arange(12).reshape(3, 4)
    batch = data.batch_of(tokens, 1)
    assert batch.response_of(batch.input_ids).tolist() == [1, 2, 3, 5, 6, 7, 9, 10, 11]
    assert batch.row["advantages"].tolist() == [1, 1, 1]
    assert batch.row["weights"] == pytest.approx([1 / 9] * 3)


def test_the_gap_of_log_probabilities() -> None:
    engine = np.array([-1.0, -2.0, -3.0, -4.0])
    found = figures.gap(engine + np.array([0.1, -0.1, 0.2, 0.0]), engine)
    assert found["mean"] == pytest.approx(0.1) and found["max"] == pytest.approx(0.2)
    assert 0.19 < found["p99"] < 0.2
    # exp(r) - 1 - r of the log ratios r
    assert found["kl"] == pytest.approx((0.0051709 + 0.0048374 + 0.0214028) / 4, rel=1e-4)
    assert figures.gap(engine, engine) == {"mean": 0, "p99": 0, "max": 0, "kl": 0}


def test_the_distance_of_curves_is_relative_to_the_first() -> None:
    assert figures.curve_distance([4.0, 2.0, 1.0], [4.4, 2.1, 1.05]) == pytest.approx(0.1)
    assert figures.curve_distance([4.0, 1.0], [4.0, 0.8]) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="shorter"):
        figures.curve_distance([4.0, 2.0], [4.0])


CURVES = {"curve bf16": {"held_out": [4.0, 2.0]}, "curve fp8": {"held_out": [4.0, 2.02]},
          "curve bf16-halves": {"held_out": [4.0, 2.002]}}  # fmt: skip
GAP = {name: {"mean": mean, "p99": 0.0, "max": 0.0, "kl": 0.0} for name, mean in (
    ("bf16_bf16", 0.01), ("bf16_fp8", 0.02), ("fp8_bf16", 0.03), ("fp8_fp8", 0.04))}  # fmt: skip


def test_figures_are_those_of_the_cases_that_ran() -> None:
    assert figures.figures({}) == {}
    assert figures.figures({"curve fp8": CURVES["curve fp8"]}) == {}
    assert figures.figures(CURVES) == pytest.approx(
        {"fp8_curve_distance_max": 0.01, "bf16_curve_distance_max": 0.001}
    )


def test_what_a_gpu_host_measured_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from_gpu: Any = importlib.import_module("from_gpu")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    origin = {"commit": "abc1234", "date": "2026-01-02", "machine": "1 x GPU"}
    from_gpu.precision({"of": origin, "cases": CURVES | {"gap": GAP}, "failed": []})
    raw, trainer = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("precision_gpu", "trainer")
    )
    assert raw["cases"]["gap"] == GAP and raw["of"].keys() == raw["cases"].keys() == {*CURVES, "gap"}
    assert trainer["figures"] == pytest.approx(
        {
            "fp8_curve_distance_max": 0.01, "bf16_curve_distance_max": 0.001,
            "logprob_gap_bf16_bf16": 0.01, "logprob_gap_bf16_fp8": 0.02,
            "logprob_gap_fp8_bf16": 0.03, "logprob_gap_fp8_fp8": 0.04,
        }
    )  # fmt: skip
    assert all(of == origin for of in trainer["of"].values())
