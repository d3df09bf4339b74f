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
pod_fit: Any = importlib.import_module("pod_fit")
pod_model: Any = importlib.import_module("pod_model")


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
    assert cpu_steps.figures()["cpu_step_model_error_pct_max"] <= 15


def test_another_core_would_show() -> None:
    profile = cpu_steps.fit()
    slower = dataclasses.replace(profile, training=1.5 * profile.training)
    errors = {row.name: row.error_pct for row in cpu_steps.compared(slower)}
    assert errors["ahead"] > 15 < errors["saving"]


def test_terms_of_other_jobs_predict_tiny_moe_on_real_pods() -> None:
    assert pod_fit.figures()["cpu_step_model_error_pct_tiny_moe"] <= 15


def test_the_errors_on_cpus_are_published() -> None:
    found = cpu_steps.figures() | pod_fit.figures()
    published = json.loads((REPO / "benchmarks" / "results" / "planner.json").read_text())["figures"]
    assert {name: published[name] for name in found} == found


def test_the_held_out_job_takes_no_part_in_the_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs, terms = pod_fit.measured(), pod_fit.terms()
    job, seconds = jobs["tiny-moe"]
    other = {phase: 2 * value for phase, value in seconds.items()}
    monkeypatch.setattr(pod_fit, "measured", lambda: jobs | {"tiny-moe": (job, other)})
    assert pod_fit.terms() == terms
    assert pod_fit.compared("tiny-moe", terms)[-1].error_pct > 15


def test_every_second_of_a_step_belongs_to_a_phase() -> None:
    for job, seconds in pod_fit.measured().values():
        assert seconds.keys() == pod_model.phases(job).keys()
        assert seconds["other"] > 0


def test_terms_are_found_from_phases_that_they_made() -> None:
    jobs = [job for job, _ in pod_fit.measured().values()]
    names = {name for job in jobs for terms in pod_model.phases(job).values() for name in terms}
    true = {name: 0.01 * (i + 1) for i, name in enumerate(sorted(names))}
    true |= {pod_model.RANKS: 2.0, pod_model.ENGINES: 1.5}
    found = pod_model.fit([(job, pod_model.predicted(job, true)) for job in jobs])
    again = {job.name: pod_model.predicted(job, found) for job in jobs}
    for job in jobs:
        assert again[job.name] == pytest.approx(pod_model.predicted(job, true), rel=0.02)
