"""Curves, phases and faults of runs of any length: bounded, and no extreme is lost."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_worker.run_page.buckets import Buckets
from grpo_worker.run_page.curves import Curves
from grpo_worker.run_page.faults import NOT_FINITE, Faults
from grpo_worker.run_page.limits import Limits
from grpo_worker.run_page.phases import Phases, phase_seconds

FEW = Limits(buckets=8, metrics=3, marks=4)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(-1e6, 1e6)), min_size=1, max_size=300), st.integers(2, 20)
)
def test_a_curve_has_the_extremes_of_every_interval_and_no_more_points(
    steps: list[tuple[int, float]], most: int
) -> None:
    """Steps are given by their distances."""
    curves, written, step = Curves(Limits(buckets=most)), [], 0
    for distance, value in steps:
        step += distance
        written.append((step, value))
        curves.add(step, {"step": step, "reward": value})
    (found,) = curves.series()
    points, width = found["points"], curves.width
    assert points == sorted(points) and len(points) <= 2 * most
    for place in {step // width for step, _ in written}:
        inside = [value for step, value in written if step // width == place]
        shown = [value for step, value in points if step // width == place]
        assert {min(inside), max(inside)} == set(shown)
    assert set(points) <= set(written), "every point is one of the run"
    if step < most:
        assert points == written


def test_curves_that_begin_at_different_steps_have_the_same_intervals() -> None:
    curves = Curves(FEW)
    for step in range(1, 101):
        curves.add(step, {"early": step} | ({"late": -step} if step > 95 else {}))
    late, early = sorted(curves.series(), key=lambda one: len(one["points"]))
    assert curves.width == 16 and late["points"] == [(96, -96), (100, -100)]
    assert len(early["points"]) == 14, "two of each interval"


def test_the_main_metrics_stay_when_there_are_too_many() -> None:
    curves = Curves(FEW)
    for step in (1, 2):
        curves.add(step, {f"z/{number}": 1.0 for number in range(9)} | {"critic/score/mean": 0.5})
    names = [one["name"] for one in curves.series()]
    assert names == ["critic/score/mean", "z/0", "z/1"]
    assert curves.hidden == 7


def test_what_is_no_finite_number_is_no_point() -> None:
    curves = Curves(FEW)
    curves.add(1, {"step": 1, "wall_time": 2.0, "a": math.nan, "b": True, "weights": ["x"], "c": "1", "d": 1})
    assert curves.series() == [{"name": "d", "points": [(1, 1)]}]


def _timed(seconds: float, **more: float) -> dict[str, Any]:
    return {"timing_s/step": seconds} | {f"timing_s/{name}": value for name, value in more.items()}


def test_phases_add_up_to_the_step() -> None:
    assert sum(phase_seconds(_timed(10.0, gen=6.0, update_actor=3.0))) == 10
    assert phase_seconds(_timed(10.0, gen=6.0, update_actor=5.0))[-1] == 0


def test_of_every_interval_the_slowest_step_is_shown() -> None:
    phases = Phases(FEW)
    for step in range(1, 33):
        phases.add(step, _timed(90.0 if step == 13 else 10.0 + step / 100, gen=5.0, trainers_idle=4.0))
    phases.add(33, {"critic/score/mean": 1.0})
    found = phases.rows()
    assert found["phases"] == ["generate", "other"] and found["pools"] == ["trainers", "engines"]
    assert len(found["rows"]) <= FEW.buckets
    assert [13, 90.0, [5.0, 85.0], [4.0, None]] in found["rows"]
    assert found["rows"][-1][0] == 32


def _kinds(faults: Faults) -> dict[str, list[list[Any]]]:
    return {kind["kind"]: kind["marks"] for kind in faults.kinds()}


def test_faults_are_counted_in_a_step_or_since_the_step_before() -> None:
    faults = Faults(Limits(), {"reward/failures": 2.0})
    for step, failures in ((1, 2.0), (2, 5.0), (3, 0.0), (4, 1.0)):
        faults.add(step, {"rollout/retries": float(step == 3), "reward/failures": failures})
    assert _kinds(faults) == {
        "requests to engines ended early": [[3, 1, "1 requests to engines ended early"]],
        "rewards failed": [[2, 3, "3 rewards failed"], [4, 1, "1 rewards failed"]],
    }


def test_restarts_name_their_reason_and_parts_and_come_first() -> None:
    faults = Faults(Limits(), {})
    faults.add(1, {"rollout/retries": math.nan, "actor/kl": math.inf})
    line = {"at": "2026-11-27T10:00:00Z", "cause": "job", "step": 7, "seconds": 9.5, "parts": {"load": 4.0}}
    faults.add_recovery(line | {"why": "rank 3 has ended"})
    faults.add_recovery(line | {"step": 8})  # of an older release
    assert [kind["restart"] for kind in faults.kinds()] == [True, False]
    assert _kinds(faults) == {
        "restart: job": [
            [7, 1, "2026-11-27T10:00:00Z, 9.5 s (load 4 s) rank 3 has ended"],
            [8, 1, "2026-11-27T10:00:00Z, 9.5 s (load 4 s)"],
        ],
        NOT_FINITE: [[1, 2, "rollout/retries, actor/kl"]],
    }


def test_many_faults_become_marks_that_count_them() -> None:
    faults = Faults(FEW, {})
    for step in range(1, 101):
        faults.add(step, {"rollout/retries": 1.0})
    (marks,) = _kinds(faults).values()
    assert len(marks) <= FEW.marks and sum(count for _, count, _ in marks) == 100


def test_a_limit_that_shows_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="groups=1: a page needs at least 2"):
        Limits(groups=1)


def test_intervals_keep_what_merge_returns() -> None:
    sums = Buckets[int](2, lambda one, other: one + other)
    for step in range(8):
        sums.add(step, 1)
    assert sums.values() == [4, 4] and sums.width == 4
