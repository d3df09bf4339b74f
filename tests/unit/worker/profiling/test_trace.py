"""Traces are written only for the selected steps and ranks."""

import json
from pathlib import Path

import pytest
import torch

from grpo_operator.api.v1alpha1.observability import ProfileSpec
from grpo_worker.profiling.trace import RankTracer, StepTrace, Traced, communication, runtime_env

SPEC = ProfileSpec(ranks=[1], step_start=2, step_end=3)


def _record(tracer: RankTracer, folder: Path) -> Traced:
    tracer.start(StepTrace("torch", (1,), 2, 3, str(folder)))
    for _ in range(2):
        torch.ones(4, 4).mm(torch.ones(4, 4))
    return tracer.stop()


def test_the_selected_steps_are_in_the_trace(tmp_path: Path) -> None:
    tracer = RankTracer(1)
    torch.ones(4, 4).mm(torch.ones(4, 4))
    traced = _record(tracer, tmp_path / "profile")
    torch.ones(4, 4).mm(torch.ones(4, 4))
    (file,) = (tmp_path / "profile").iterdir()
    events = json.loads(file.read_text())["traceEvents"]
    assert file.name == traced.file == "trainer-rank-1-steps-2-3.json"
    assert sum(event.get("name") == "aten::mm" for event in events) == 2
    assert traced.figures["profile/communication_share"] == 0.0


def test_a_rank_records_one_trace_after_the_other(tmp_path: Path) -> None:
    tracer = RankTracer(1)
    for name in ("first", "second"):
        assert _record(tracer, tmp_path / name).file
        assert list((tmp_path / name).iterdir())


def test_other_ranks_write_no_trace(tmp_path: Path) -> None:
    assert _record(RankTracer(0), tmp_path / "profile") == Traced()
    assert not (tmp_path / "profile").exists()


def test_a_folder_that_cannot_be_written_is_named_and_ends_no_step(tmp_path: Path) -> None:
    (tmp_path / "profile").write_text("a file")
    traced = _record(RankTracer(1), tmp_path / "profile")
    assert traced.file == "" and "FileExistsError" in traced.error


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
