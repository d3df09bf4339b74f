"""Times in the status of a job, and the limits that its alerts compare them with."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from grpo_devcluster.install import CHART
from grpo_operator.api.messages import MemoryCopies
from grpo_operator.api.v1alpha1.status import GRPOJobStatus, Phase
from grpo_operator.kuberay_client.models import RayClusterStatus
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.planner.resolve import resolve
from grpo_operator.plan.status.grpojob import job_status, layout_status, refused_status
from grpo_operator.plan.status.phase_times import phase_limit
from grpo_operator.settings import PHASE_SECONDS, load_settings
from support.objects import NOW, job, pool_of, running, spec_of

LAYOUT = layout_status(resolve(spec_of(job()), pool_of(spec_of(job()))))
LATER, LAST = "2026-01-01T01:00:00Z", "2026-01-01T02:00:00Z"


class _Watched:
    """A job whose status follows what the operator observes."""

    def __init__(self, **spec: Any) -> None:
        self.job = job(**spec)

    def sees(self, observed: Observed, now: str) -> GRPOJobStatus:
        spec = spec_of(self.job)
        status = job_status(self.job, spec, LAYOUT, pool_of(spec), observed, now)
        self.job["status"] = status.wire()
        return status

    def waits(self, reason: str, now: str) -> GRPOJobStatus:
        status = refused_status(self.job, reason, "no room", now, waits=True)
        self.job["status"] = status.wire()
        return status


def test_progress_is_another_phase_or_another_step() -> None:
    watched = _Watched()
    assert watched.waits("WaitingForCapacity", NOW).progressed_at == NOW
    assert watched.waits("WaitingForPool", LATER).progressed_at == NOW, "it still waits"
    assert watched.sees(running(step=7), LATER).progressed_at == LATER
    assert watched.sees(running(step=7, reward_mean=0.5), LAST).progressed_at == LATER
    assert watched.sees(running(step=8), LAST).progressed_at == LAST


def test_a_job_of_an_operator_without_these_times_begins_now() -> None:
    watched = _Watched()
    watched.sees(running(), NOW)
    del watched.job["status"]["progressedAt"]
    assert watched.sees(running(), LATER).progressed_at == LATER


def test_trainers_are_parked_since_they_began_to_wait() -> None:
    watched = _Watched()
    assert watched.sees(running(), NOW).parked_since is None
    parked = running("Recovering", waiting="waiting since then: no engine serves")
    assert watched.sees(parked, LATER).parked_since == LATER
    assert watched.sees(parked, LAST).parked_since == LATER
    assert watched.sees(running(), LAST).parked_since is None
    assert watched.sees(parked, LAST).parked_since == LAST
    assert watched.waits("WaitingForCapacity", LAST).parked_since is None


def test_a_job_that_has_ended_or_has_lost_its_controller_is_not_parked() -> None:
    watched = _Watched()
    watched.sees(running("Recovering", waiting="no engine serves"), NOW)
    assert watched.sees(Observed(RayClusterStatus(), (), None), LATER).parked_since is None
    assert watched.sees(running("Failed", waiting="no engine serves"), LATER).parked_since is None


def _completed(status: GRPOJobStatus) -> str | None:
    assert status.last_checkpoint is not None
    return status.last_checkpoint.completed_at


def test_a_checkpoint_was_complete_when_its_controller_says_so() -> None:
    watched = _Watched()
    assert _completed(watched.sees(running(checkpoint_time=NOW), LATER)) == NOW
    found = watched.sees(running(checkpoint_time="", attempt=2), LATER)
    assert _completed(found) == NOW, "the next controller has found it"
    assert _completed(watched.sees(running(last_checkpoint=10), LAST)) == LAST, "nobody has seen it complete"


def test_the_duration_of_the_last_step_stays_while_a_controller_starts() -> None:
    watched = _Watched()
    assert watched.sees(running(step_seconds=792.04), NOW).step_seconds == "792.0"
    assert watched.sees(running("Starting", attempt=2), LATER).step_seconds == "792.0"


@pytest.mark.parametrize(("failures", "reason"), [(0, None), (1, None), (2, "MemoryCopiesFail")])
def test_copies_that_fail_again_and_again_are_a_reason(failures: int, reason: str | None) -> None:
    watched = _Watched()
    copies = MemoryCopies(step=6, failures=failures, problem="rank 3 has no memory" if failures else "")
    status = watched.sees(running(memory_copies=copies), NOW)
    assert status.reason == reason and status.memory_copies is not None
    assert (status.memory_copies.step, status.memory_copies.failures) == (6, failures)
    (degraded,) = [c for c in status.conditions if c.type == "Degraded"]
    assert ("rank 3 has no memory" in degraded.message) == bool(reason)
    assert watched.sees(running("Starting", attempt=2), LATER).memory_copies == status.memory_copies


LEAST = dict.fromkeys(PHASE_SECONDS, 1800.0)
ENGINES = {"engine": {"startSeconds": 3600}}


def _limit(phase: str, pool: dict[str, Any] | None = None, hang: int = 0, step: str = "0") -> float | None:
    policy = {"restartPolicy": {"hangSeconds": hang}} if hang else {}
    return phase_limit(phase, {"spec": policy, "status": {"stepSeconds": step}}, pool or {}, LEAST)


@pytest.mark.parametrize("phase", ["Starting", "Training", "Recovering", "Parked", "Suspending"])
def test_a_job_at_work_has_a_limit_of_its_own_size(phase: str) -> None:
    assert _limit(phase) == 1800
    assert _limit(phase, hang=3000) == 6000, "an attempt after one that hung"
    assert _limit(phase, step="792.0") == 2376, "three steps"
    starts_engines = phase not in ("Training", "Suspending")
    assert _limit(phase, ENGINES) == (3600 if starts_engines else 1800)


@pytest.mark.parametrize("phase", ["Waiting", "Pending"])
def test_what_a_job_does_later_does_not_change_how_long_it_may_wait(phase: str) -> None:
    assert _limit(phase, ENGINES, hang=3000, step="792.0") == 1800


def test_a_planned_deadline_counts_as_one_of_the_spec() -> None:
    planned = {"layout": {"deadlines": {"hangSeconds": 2000, "timeoutSeconds": 120}}}
    assert phase_limit("Training", {"spec": {}, "status": planned}, {}, LEAST) == 4000


def test_phases_without_a_limit_may_last() -> None:
    assert phase_limit("Suspended", {}, ENGINES, LEAST) is None
    assert phase_limit("Training", {}, ENGINES, LEAST | {"Training": 0}) is None


def test_the_chart_has_the_limits_of_the_operator(tmp_path: Path) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())["metrics"]["phaseSeconds"]
    assert values == dict(PHASE_SECONDS) and values.keys() - {"Parked"} <= set(Phase)
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"images": {"trainer": "t", "rollout": "r"}, "phaseSeconds": {"Parked": 60}}))
    assert load_settings(file).phase_seconds == {**PHASE_SECONDS, "Parked": 60}
