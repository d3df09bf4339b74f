"""Traces are written for the wanted steps and ranks, and for no other."""

import json
from pathlib import Path

import pytest
import torch

from grpo_operator.api.grpojob import ProfileSpec
from grpo_worker.profiling.trace import StepTrace

SPEC = ProfileSpec(ranks=[1], step_start=2, step_end=3)


def _run(trace: StepTrace) -> None:
    for step in range(1, 6):
        trace.begin(step)
        torch.ones(4, 4).mm(torch.ones(4, 4))
        trace.end(step)


def test_the_wanted_steps_are_in_the_trace(tmp_path: Path) -> None:
    _run(StepTrace(SPEC, 1, tmp_path / "profile"))
    (file,) = (tmp_path / "profile").iterdir()
    events = json.loads(file.read_text())["traceEvents"]
    assert file.name == "steps-2-3-rank-1.json"
    assert sum(event.get("name") == "aten::mm" for event in events) == 2


@pytest.mark.parametrize(("spec", "rank"), [(None, 1), (SPEC, 0)])
def test_others_write_nothing(tmp_path: Path, spec: ProfileSpec | None, rank: int) -> None:
    _run(StepTrace(spec, rank, tmp_path / "profile"))
    assert not (tmp_path / "profile").exists()


def test_the_order_of_steps_is_checked() -> None:
    with pytest.raises(ValueError, match=r"stepStart \(3\) must not exceed stepEnd \(2\)"):
        ProfileSpec(step_start=3, step_end=2)
