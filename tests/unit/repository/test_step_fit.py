"""The planner's efficiencies are those that the measured cases give."""

import dataclasses
import importlib
import sys
from typing import Any

import pytest

from grpo_devcluster.paths import REPO
from grpo_operator.plan.planner.efficiency import MEASURED

sys.path.insert(0, str(REPO / "benchmarks"))

step_fit: Any = importlib.import_module("step_fit")


def test_the_efficiencies_are_the_fit_to_the_measured_cases() -> None:
    fitted, used = dataclasses.asdict(step_fit.fit()), dataclasses.asdict(MEASURED)
    assert used == pytest.approx(fitted, rel=0.01)


def test_steps_that_were_held_out_are_predicted() -> None:
    figures = step_fit.figures(MEASURED)
    assert figures["step_model_cases"] >= 3
    assert figures["step_model_error_pct_max"] <= 15


def test_a_wrong_efficiency_would_show() -> None:
    wrong = dataclasses.replace(MEASURED, local_expert=2 * MEASURED.local_expert)
    assert step_fit.figures(wrong)["step_model_error_pct_max"] > 15
