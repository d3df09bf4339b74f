"""The planner's efficiencies of Transformer Engine are those that the measured updates give."""

import dataclasses
import importlib
import json
import sys
from typing import Any

import pytest

from grpo_devcluster.paths import REPO
from grpo_operator.api.v1alpha1.trainer import KernelChoice, Precision
from grpo_operator.plan.planner.efficiency import FP8_BLOCK128, MEASURED, TRANSFORMER_ENGINE, of_kernels

sys.path.insert(0, str(REPO / "benchmarks"))

kernel_fit: Any = importlib.import_module("kernel_fit")


@pytest.mark.slow  # fits again: two minutes
def test_the_efficiencies_are_the_fit_to_the_measured_updates() -> None:
    for fitted, used in zip(kernel_fit.fit(), (TRANSFORMER_ENGINE, FP8_BLOCK128), strict=True):
        assert dataclasses.asdict(used) == pytest.approx(dataclasses.asdict(fitted), rel=0.02)


def test_the_memory_of_updates_that_were_held_out_is_predicted() -> None:
    figures = kernel_fit.figures()
    assert figures["heldout_updates"] >= 12 and figures["memory_error_pct_heldout_max"] <= 5


def test_the_errors_are_published() -> None:
    figures = json.loads((REPO / "benchmarks" / "results" / "trainer.json").read_text())["figures"]
    found = kernel_fit.figures()
    assert {name: figures[name] for name in found} == found


def test_fp8_without_its_second_copy_of_the_weights_would_show() -> None:
    rows = [row for row in kernel_fit.measured() if row.case.precision is Precision.FP8_BLOCK128]
    plain = [
        dataclasses.replace(row, case=dataclasses.replace(row.case, precision=Precision.BF16)) for row in rows
    ]
    assert max(1 - row.planned_peak() / row.peak for row in plain) > 0.05


@pytest.mark.parametrize(
    ("choice", "precision", "expected"),
    [
        (KernelChoice.LOCAL, Precision.BF16, MEASURED),
        (KernelChoice.AUTO, Precision.BF16, TRANSFORMER_ENGINE),
        (KernelChoice.TRANSFORMER_ENGINE, Precision.FP8_BLOCK128, FP8_BLOCK128),
    ],
)
def test_a_plan_takes_the_efficiency_of_its_kernels(choice: Any, precision: Any, expected: Any) -> None:
    assert of_kernels(choice, precision) is expected
