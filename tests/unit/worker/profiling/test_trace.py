"""Traces are written only for the selected steps and ranks."""

import json
from pathlib import Path

import pytest
import torch

from grpo_operator.api.v1alpha1.observability import ProfileSpec
from grpo_worker.profiling.trace import StepTrace, communication, runtime_env

SPEC = ProfileSpec(ranks=[1], step_start=2, step_end=3)


def _run(trace: StepTrace) -> None:
    for step in range(1, 6):
        trace.begin(step)
        torch.ones(4, 4).mm(torch.ones(4, 4))
        trace.end(step)


def test_the_selected_steps_are_in_the_trace(tmp_path: Path) -> None:
    _run(StepTrace(SPEC, 1, tmp_path / "profile"))
    (file,) = (tmp_path / "profile").iterdir()
    events = json.loads(file.read_text())["traceEvents"]
    assert file.name == "steps-2-3-rank-1.json"
    assert sum(event.get("name") == "aten::mm" for event in events) == 2


@pytest.mark.parametrize(("spec", "rank"), [(None, 1), (SPEC, 0)])
def test_other_ranks_write_no_trace(tmp_path: Path, spec: ProfileSpec | None, rank: int) -> None:
    _run(StepTrace(spec, rank, tmp_path / "profile"))
    assert not (tmp_path / "profile").exists()


def test_the_order_of_steps_is_checked() -> None:
    with pytest.raises(
        ValueError, match=r"stepStart must not exceed stepEnd \(got stepStart: 3, stepEnd: 2\)"
    ):
        ProfileSpec(step_start=3, step_end=2)


def test_communication_is_measured_once_where_collectives_overlap() -> None:
    events = [
        ("aten::mm", 0.0, 4000.0),
        ("ncclDevKernel_AllGather_RING".lower(), 1000.0, 3000.0),
        ("nccldevkernel_reducescatter_sum", 2000.0, 4000.0),
        ("aten::add", 4000.0, 10000.0),
    ]
    found = communication(events)
    assert found["profile/communication_share"] == pytest.approx(0.3)
    assert found["profile/all_gather_ms"] == pytest.approx(2.0)
    assert found["profile/gradient_sync_ms"] == pytest.approx(2.0)


def test_ranks_run_under_nsight_only_when_asked() -> None:
    assert runtime_env(SPEC, "/store/job/profile") == {}
    wanted = ProfileSpec(tool="nsight", step_start=2, step_end=3)
    options = runtime_env(wanted, "/store/job/profile")["nsight"]
    assert options["o"] == "/store/job/profile/nsight-%h-%p"
    assert options["capture-range"] == "cudaProfilerApi"
