"""Steps, progress and remaining time of a job whose ``totalSteps`` changes: as its controller has it."""

from typing import Any

from grpo_operator.api.v1alpha1.status import GRPOJobStatus
from grpo_operator.kuberay_client.models import RayClusterStatus
from grpo_operator.plan import resumption
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.planner.resolve import resolve
from grpo_operator.plan.status.grpojob import job_status, layout_status
from grpo_operator.plan.status.remaining import total_steps_event
from support.objects import NOW, job, pool_of, running, spec_of

LAYOUT = layout_status(resolve(spec_of(job()), pool_of(spec_of(job()))))
GONE = Observed(RayClusterStatus(state="suspended"))


class Job:
    """A job of 100 steps. ``events``: messages about its number of steps."""

    def __init__(self) -> None:
        self.manifest = job(totalSteps=100)
        self.events: list[str] = []

    def sees(self, observed: Observed) -> GRPOJobStatus:
        """Reconcile."""
        before, spec = self.manifest.get("status") or {}, spec_of(self.manifest)
        status = job_status(self.manifest, spec, LAYOUT, pool_of(spec), observed, NOW)
        self.manifest["status"] = status.wire()
        event = total_steps_event(before, self.manifest["status"])
        self.events += [f"{event.reason}: {event.message}"] if event else []
        return status

    def set(self, **spec: Any) -> None:
        self.manifest["spec"] |= spec


def _report(step: int, total: int, phase: str = "Training") -> Observed:
    return running(phase, step=step, total_steps=total, step_seconds=60.0)


def _shown(status: GRPOJobStatus) -> tuple[str | None, int | None, str | None]:
    return status.progress, status.total_steps, status.eta


def test_a_running_job_shows_what_its_controller_follows() -> None:
    made = Job()
    assert _shown(made.sees(_report(7, 100))) == ("7/100", 100, "1h33m")
    made.set(totalSteps=20)
    assert _shown(made.sees(_report(8, 100))) == ("8/100", 100, "1h32m"), "kubelet has not written it yet"
    assert made.events == []
    assert _shown(made.sees(_report(8, 20))) == ("8/20", 20, "12m")
    assert made.events == ["TotalStepsChanged: the job ends after step 20 (before: 100)"]
    assert _shown(made.sees(Observed(RayClusterStatus(), running().pods)))[:2] == ("8/20", 20), "no answer"
    made.sees(_report(9, 20))
    assert len(made.events) == 1


def test_a_job_that_was_cut_short_has_all_of_its_steps_and_ends() -> None:
    made = Job()
    made.sees(_report(50, 100))
    made.set(totalSteps=10)
    made.sees(_report(51, 51))
    for observed in (_report(51, 51, "Succeeded"), GONE):
        status = made.sees(observed)
        assert (status.phase, *_shown(status)) == ("Succeeded", "51/51", 51, None)
    assert resumption.requested(made.manifest, spec_of(made.manifest)) is None
    made.set(totalSteps=60)
    status = made.sees(GONE)
    assert (status.phase, *_shown(status)) == ("Recovering", "51/60", 60, None)
    assert len(made.events) == 1, "a resumption has an event of its own"


def test_a_suspended_job_shows_what_its_next_controller_will_follow() -> None:
    made = Job()
    made.sees(_report(50, 100))
    made.set(suspend=True)
    made.sees(_report(50, 100, "Suspended"))
    assert made.sees(GONE).phase == "Suspended"
    made.set(totalSteps=70)
    assert _shown(made.sees(GONE)) == ("50/70", 70, None)
    assert made.events == []


def test_a_controller_that_has_not_begun_and_an_older_one_report_no_number() -> None:
    made = Job()
    assert _shown(made.sees(running("Starting", step=0, attempt=0, total_steps=30)))[1] == 100
    assert _shown(made.sees(_report(7, 0)))[1] == 100
