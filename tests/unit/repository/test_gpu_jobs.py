"""Figures of the jobs of pods on GPUs are those of the recorded steps."""

import importlib
import json
import sys
from typing import Any

from grpo_devcluster.paths import REPO
from grpo_devcluster.results import RESULTS

sys.path.insert(0, str(REPO / "benchmarks" / "gpu"))

gpu_jobs: Any = importlib.import_module("gpu_jobs")


def _read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _faulted() -> Any:
    return _read("gpu_faults")["cases"] if (RESULTS / "gpu_faults.json").exists() else {}


def test_the_published_figures_are_those_of_the_cases() -> None:
    published, deterministic = _read("gpu_kubernetes"), _read("deterministic_gpu")["cases"]
    assert gpu_jobs.figures(published["cases"], deterministic, _faulted()) == published["figures"]
    for case in published["cases"].values():
        done, of = map(int, case["progress"].split("/"))
        assert len(case["steps"]) == case["figures"]["steps"] == done
        assert (case["phase"] == "Succeeded") == (done == of)


def test_a_job_that_was_stopped_is_not_among_those_that_succeeded() -> None:
    case = _read("gpu_kubernetes")["cases"]["deepseek-v3-1b-1gpu"]
    deterministic = _read("deterministic_gpu")["cases"]
    for phase, succeeded in (("Training", 0), ("Succeeded", 1)):
        found = gpu_jobs.figures({"deepseek-v3-1b-1gpu": case | {"phase": phase}}, deterministic, {})
        assert found["jobs_succeeded"] == succeeded


def test_only_faults_that_were_survived_count_and_the_slowest_recovery_is_named() -> None:
    faults = [
        {"fault": "rank", "witness": "w", "seconds": 20.0},
        {"fault": "trainer_pod", "witness": "w", "seconds": 31.0},
        {"fault": "engine_updating", "failed": "no step"},
    ]
    content = {
        "faults": faults, "differences": {"actor/loss": 0.0, "critic/score/mean": 1e-7}, "equal_steps": 9,
        "status": {"phase": "Succeeded", "progress": "44/44"},
    }  # fmt: skip
    found = gpu_jobs.fault_figures({"deepseek-v3-1b-4gpu": gpu_jobs.fault_case(content)})
    assert found == {
        "faults_survived_4": 2, "replay_difference_4": 1e-7, "replay_equal_steps_4": 9,
        "recovery_seconds_trainer_4": 31.0,
    }  # fmt: skip
