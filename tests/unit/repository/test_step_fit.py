"""The planner's efficiencies are those that the measured cases give."""

import dataclasses
import importlib
import json
import sys
from typing import Any

import pytest

from grpo_devcluster.paths import REPO
from grpo_operator.plan.planner.efficiency import MEASURED

sys.path.insert(0, str(REPO / "benchmarks"))

step_fit: Any = importlib.import_module("step_fit")
cpu_steps: Any = importlib.import_module("cpu_steps")


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


def test_a_core_that_was_fitted_to_one_job_predicts_the_others_on_its_machine() -> None:
    found = cpu_steps.figures()
    assert found["cpu_step_model_error_pct_max"] <= 15
    published = json.loads((REPO / "benchmarks" / "results" / "planner.json").read_text())["figures"]
    assert {name: published[name] for name in found} == found


def test_another_core_would_show() -> None:
    profile = cpu_steps.fit()
    slower = dataclasses.replace(profile, training=1.5 * profile.training)
    errors = {row.name: row.error_pct for row in cpu_steps.compared(slower)}
    assert errors["ahead"] > 15 < errors["saving"]
