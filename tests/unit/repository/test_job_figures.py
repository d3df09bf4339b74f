"""Figures of the committed raw data are those that the benchmarks' code computes from them."""

import importlib
import json
import sys
from typing import Any

import pytest

from grpo_devcluster.paths import REPO

sys.path.insert(0, str(REPO / "benchmarks" / "gpu"))

job_figures: Any = importlib.import_module("job_figures")


def _results(name: str) -> dict[str, Any]:
    return dict(json.loads((REPO / "benchmarks" / "results" / f"{name}.json").read_text()))


@pytest.mark.parametrize("name", ["job_cpu", "job_gpu"])
def test_figures_of_whole_jobs(name: str) -> None:
    content = _results(name)
    computed = job_figures.figures({job: steps for job, steps in content["cases"].items() if job != "trl"})
    recorded = {key: value for key, value in content["figures"].items() if not key.startswith("step_ratio")}
    assert computed == pytest.approx(recorded)


def test_figures_of_colocated_jobs() -> None:
    for case in _results("colocated_gpu")["cases"].values():
        computed = job_figures.colocated_figures(case["steps"], case["megabytes_used"])
        assert computed == pytest.approx(case["figures"])


def test_seconds_and_tokens_of_the_baseline_leave_out_the_warm_up() -> None:
    figures = job_figures.trl_figures([0.0, 10.0, 12.0, 13.0, 15.0], [100, 200, 300, 500])
    assert figures["seconds"] == [10, 2, 1, 2] and figures["tokens"] == [100, 100, 100, 200]
    assert figures["tokens_per_second"] == 100
