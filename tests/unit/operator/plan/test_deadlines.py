"""Deadlines that the plan derives where a spec sets none, and those that it refuses."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.cli.report import as_data, as_table
from grpo_operator.plan.planner import deadlines
from grpo_operator.plan.planner.deadlines import (
    LongestUnits,
    deadline_problems,
    longest_units,
    planned_deadlines,
)
from grpo_operator.plan.planner.resolve import RefusedError, resolve, training_pool
from grpo_operator.plan.planner.settled import with_layout
from grpo_operator.plan.status.grpojob import layout_status
from support.objects import job, pool_of, spec_of

MANIFESTS = Path(__file__).parents[4] / "manifests"


def _spec(manifest: str = "deepseek-v3-512xh100.yaml", **changes: Any) -> GRPOJobSpec:
    body = yaml.safe_load((MANIFESTS / manifest).read_text())["spec"]
    for field, values in changes.items():
        body[field] = body.get(field, {}) | values
    return GRPOJobSpec.model_validate(body)


def test_units_follow_the_work_and_deadlines_follow_the_units() -> None:
    short, long = _spec("qwen3-8b-2gpu.yaml"), _spec("qwen3-8b-2gpu.yaml", trainer={"maxTokensPerGpu": 24576})
    units = [resolve(spec, pool_of(spec)).units for spec in (short, long)]
    assert units[0] is not None and units[1] is not None
    tokens = short.trainer.max_tokens_per_gpu or 0
    assert 0 < tokens < 24576
    assert units[1].rank > 0.8 * 24576 / tokens * units[0].rank
    assert planned_deadlines(LongestUnits(rank=101, wave=50, leave=100)).model_dump() == {
        "hang_seconds": 810,
        "timeout_seconds": 420,
        "grace_seconds": 150,
    }


def test_the_grace_covers_the_update_and_the_save_and_can_be_given() -> None:
    spec = _spec()
    plan = resolve(spec, pool_of(spec))
    assert plan.units is not None and plan.deadlines is not None
    grace = plan.deadlines.grace_seconds
    assert grace is not None and grace > 600
    saved = max(stage.saved for stage in plan.stages) * spec.trainer.gpus_per_node / 1e9
    assert saved < plan.units.leave < grace <= 1.5 * plan.units.leave + 30
    settled = with_layout(spec, layout_status(plan)).restart_policy
    assert settled.grace_limit == grace
    given = _spec(restartPolicy={"graceSeconds": 45})
    assert with_layout(given, layout_status(plan)).restart_policy.grace_limit == 45


def test_a_pass_without_gradients_may_be_the_longest_unit() -> None:
    def rank(factor: int | None) -> float:
        plain = _spec("qwen3-8b-2gpu.yaml")
        tokens = factor and factor * (plain.trainer.max_tokens_per_gpu or 0)
        spec = _spec("qwen3-8b-2gpu.yaml", trainer={"logProbMaxTokensPerGpu": tokens})
        plan = resolve(plain, pool_of(plain))
        assert plan.model is not None
        training = training_pool(spec, pool_of(spec), plan.model, plan.recompute, plan.offload)
        return longest_units(spec, pool_of(spec), training, plan.layout).rank

    assert rank(None) == rank(1) == rank(2), "an update has four passes, and reduces gradients"
    assert rank(16) == pytest.approx(2 * rank(8)) and rank(8) > rank(None)


def test_short_units_and_unknown_ones_get_the_smallest_defaults() -> None:
    smallest = {"hang_seconds": 240, "timeout_seconds": 120, "grace_seconds": 60}
    assert planned_deadlines(LongestUnits(rank=0.5, wave=0.01)).model_dump() == smallest
    assert planned_deadlines(None).model_dump() == smallest
    assert resolve(spec_of(job()), pool_of(spec_of(job()))).units is None, "on CPUs"


def test_a_spec_without_deadlines_gets_those_of_its_acceptance() -> None:
    spec = _spec()
    layout = layout_status(resolve(spec, pool_of(spec)))
    assert layout.deadlines is not None
    longer = layout.deadlines.model_copy(update={"hang_seconds": 900})
    layout = layout.model_copy(update={"deadlines": longer})
    completed = with_layout(spec, layout)
    assert (completed.restart_policy.hang_seconds, completed.weight_sync.timeout_seconds) == (900, 120)
    assert completed.stall_seconds == 960
    accepted_before = layout.model_copy(update={"deadlines": None})
    assert with_layout(spec, accepted_before).restart_policy.hang_seconds == 240


def test_a_spec_accepted_by_a_release_without_a_deadline_stays_as_that_release_wrote_it() -> None:
    spec = _spec()
    layout = layout_status(resolve(spec, pool_of(spec)))
    without = {"deadlines": {"hangSeconds": 900, "timeoutSeconds": 120}}
    completed = with_layout(spec, type(layout).model_validate(layout.wire() | without)).restart_policy
    assert completed.grace_seconds is None and completed.grace_limit == 60


def test_deadlines_of_the_spec_are_kept() -> None:
    spec = _spec(restartPolicy={"hangSeconds": 60}, weightSync={"timeoutSeconds": 20})
    completed = with_layout(spec, layout_status(resolve(spec, pool_of(spec))))
    assert (completed.restart_policy.hang_seconds, completed.weight_sync.timeout_seconds) == (60, 20)


def test_deadlines_that_are_shorter_than_the_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = _spec(restartPolicy={"hangSeconds": 30})
    (problem,) = deadline_problems(spec, LongestUnits(rank=20, wave=0.01))
    assert problem.startswith("spec.restartPolicy.hangSeconds: 30 s") and "at least 40" in problem
    assert not deadline_problems(spec, LongestUnits(rank=15, wave=0.01))
    assert not deadline_problems(_spec(), LongestUnits(rank=2000, wave=2000)), "the plan sets them"
    (problem,) = deadline_problems(_spec(weightSync={"timeoutSeconds": 1}), LongestUnits(1, 0.6))
    assert problem.startswith("spec.weightSync.timeoutSeconds: 1 s") and "at least 2" in problem
    spec = _spec("qwen3-8b-2gpu.yaml", restartPolicy={"hangSeconds": 30})
    monkeypatch.setattr(deadlines, "_LEAST", 10)  # a unit of 15 s needs more memory than a GPU has
    with pytest.raises(RefusedError, match=r"hangSeconds: 30 s .* lower trainer\.maxTokensPerGpu"):
        resolve(spec, pool_of(spec))


def test_the_plan_prints_deadlines_beside_the_units() -> None:
    spec = _spec(restartPolicy={"hangSeconds": 500})
    pool = pool_of(spec)
    data = as_data(spec, pool, resolve(spec, pool), 1e9)
    limits = data["deadlines"]
    assert (limits["hang"], limits["timeout"], limits["start"]) == (500, 120, pool.engine.start_seconds)
    text = f"no progress     trainers 500 s (micro-batch {limits['rank']:.2g} s), weights 120 s (wave "
    assert text in as_table(data)
