"""Jobs that go on after their end: when, and what the status says."""

from typing import Any

import pytest

from grpo_operator.api.names import RESUME_ANNOTATION
from grpo_operator.api.v1alpha1.status import GRPOJobStatus
from grpo_operator.kuberay_client.models import RayClusterStatus
from grpo_operator.plan import resumption
from grpo_operator.plan.observed import Observed, own_report
from grpo_operator.plan.planner.resolve import resolve
from grpo_operator.plan.status.events import job_event
from grpo_operator.plan.status.grpojob import job_status, layout_status
from support.objects import NOW, controller_status, job, pool_of, running, spec_of

LAYOUT = layout_status(resolve(spec_of(job()), pool_of(spec_of(job()))))
GONE = Observed(RayClusterStatus(state="suspended"))


def _next(manifest: dict[str, Any], observed: Observed) -> GRPOJobStatus:
    """Reconcile: return the new status, which the manifest has then."""
    spec = spec_of(manifest)
    status = job_status(manifest, spec, LAYOUT, pool_of(spec), observed, NOW)
    manifest["status"] = status.wire()
    return status


def _ended(phase: str, step: int, message: str = "no more") -> dict[str, Any]:
    manifest = job()
    _next(manifest, running())
    restarts = {"job": 3, "infrastructure": 1}
    _next(manifest, running(phase, step=step, message=message, restarts=restarts))
    assert manifest["status"]["phase"] == phase
    return manifest


def _ask(manifest: dict[str, Any], value: str) -> None:
    manifest["metadata"].setdefault("annotations", {})[RESUME_ANNOTATION] = value


def _event(manifest: dict[str, Any], observed: Observed) -> Any:
    before = manifest["status"]
    return job_event(before, _next(manifest, observed).wire())


def test_a_succeeded_job_goes_on_when_its_total_is_raised() -> None:
    manifest = _ended("Succeeded", 120)
    assert resumption.requested(manifest, spec_of(manifest)) is None
    manifest["spec"]["totalSteps"] = 200
    assert resumption.times(manifest, spec_of(manifest)) == 1, "its next pods read this number"
    event = _event(manifest, GONE)
    assert (event.reason, event.warning) == (
        "Resumed",
        False,
    ) and "totalSteps=200: 120 steps" in event.message
    status = manifest["status"]
    assert status["phase"] == "Recovering" and "finishedAt" not in status and status["progress"] == "120/200"
    assert status["restarts"] == {"job": 3, "infrastructure": 1} and status["lastCheckpoint"]["step"] == 5
    true = {c["type"] for c in status["conditions"] if c["status"] == "True"}
    assert "Succeeded" not in true and {"Progressing", "Reconciling"} <= true
    assert resumption.times(manifest, spec_of(manifest)) == 1
    assert _next(manifest, running(step=121)).phase == "Training"
    assert _next(manifest, running("Succeeded", step=200)).phase == "Succeeded"
    assert resumption.requested(manifest, spec_of(manifest)) is None


def test_a_job_that_has_diverged_says_so() -> None:
    manifest = job()
    _next(manifest, running())
    for observed in (running("Failed", step=57, message="actor/ppo_kl was above 1", diverged=True), GONE):
        assert _next(manifest, observed).reason == "Diverged"


def test_a_job_that_validation_has_ended_says_so_also_without_its_controller() -> None:
    manifest = job()
    _next(manifest, running())
    report = running("Failed", step=57, message="the mean score of aime has fallen", regressed=True)
    event = _event(manifest, report)
    assert (event.reason, event.warning, event.message) == (
        "Failed", True, "the mean score of aime has fallen",
    )  # fmt: skip
    for observed in (report, running(), GONE):
        status = _next(manifest, observed)
        failed = {c.type: c.reason for c in status.conditions if c.status == "True"}
        assert status.phase == "Failed" and status.reason == "ValidationRegressed"
        assert failed == {"Failed": "ValidationRegressed", "Stalled": "ValidationRegressed"}
    _ask(manifest, "1")
    status = _next(manifest, GONE)
    assert status.phase == "Recovering" and status.reason is None
    assert _next(manifest, running("Failed", step=60)).reason is None, "for another reason"


def test_a_failed_job_goes_on_only_when_it_is_asked_to() -> None:
    manifest = _ended("Failed", 57, "the reward has no function grade")
    manifest["spec"]["totalSteps"] = 200
    assert not resumption.granted(manifest, spec_of(manifest)), "more steps mend nothing"
    _ask(manifest, "1")
    assert _event(manifest, GONE).reason == "Resumed"
    status = manifest["status"]
    assert status["phase"] == "Recovering" and status["lastFailure"] == "the reward has no function grade"
    assert status["resumption"] == {
        "times": 1, "at": NOW, "request": "1", "message": f"resumed by {RESUME_ANNOTATION}=1",
    }  # fmt: skip
    _next(manifest, running("Failed", step=60))
    assert not resumption.granted(manifest, spec_of(manifest)), "the same value was used"
    _ask(manifest, "2")
    _next(manifest, GONE)
    assert manifest["status"]["resumption"]["times"] == 2


@pytest.mark.parametrize("cluster", [None, RayClusterStatus(state="suspended")], ids=["deleted", "suspended"])
def test_it_goes_on_when_its_old_pods_are_gone(cluster: RayClusterStatus | None) -> None:
    manifest = _ended("Failed", 57)
    _ask(manifest, "now")
    for seen in (running("Failed", step=57), Observed(RayClusterStatus()), Observed(cluster, running().pods)):
        status = _next(manifest, seen)
        assert status.phase == "Failed" and status.resumption is None
    status = _next(manifest, Observed(cluster, (), controller_status("Failed", step=57)))
    assert status.phase == "Recovering", "a report that outlives its pod ends nothing"


def test_a_report_from_before_the_resumption_is_not_the_jobs_own() -> None:
    manifest = _ended("Failed", 57)
    _ask(manifest, "now")
    _next(manifest, GONE)
    for resumes, own in ((0, False), (1, True), (None, True)):
        report = controller_status("Failed", resumes=resumes)
        assert (own_report(manifest, report) is report) is own


def test_a_request_that_cannot_be_met_changes_nothing_but_says_why() -> None:
    manifest = _ended("Succeeded", 120)
    before = manifest["status"]
    _ask(manifest, "more")
    event = _event(manifest, GONE)
    assert (event.reason, event.warning) == ("ResumeRefused", True)
    assert "all of totalSteps=120 steps are done: raise it" in event.message
    after = dict(manifest["status"])
    assert after.pop("resumption")["request"] == "more"
    assert after | {"train": before["train"]} == before | {
        key: after[key] for key in ("rollout", "trainReady", "rolloutReady")
    }
    assert _event(manifest, GONE) is None
    manifest["spec"]["totalSteps"] = 130
    assert _event(manifest, GONE).reason == "Resumed"


def test_a_value_from_before_the_end_is_used_up() -> None:
    manifest = job()
    _ask(manifest, "copied with the manifest")
    manifest["status"] = {}
    assert _event(manifest, Observed()).reason == "Starting"
    assert manifest["status"]["resumption"]["request"] == "copied with the manifest"
    _next(manifest, running())
    _ask(manifest, "too early")
    event = _event(manifest, running())
    assert event.reason == "ResumeRefused" and "the job has not ended" in event.message
    _next(manifest, running("Failed"))
    assert not resumption.granted(manifest, spec_of(manifest))


def test_a_job_that_is_resumed_and_suspended_gets_no_pods() -> None:
    manifest = _ended("Failed", 57)
    manifest["spec"]["suspend"] = True
    _ask(manifest, "1")
    assert _next(manifest, GONE).phase == "Suspended"
