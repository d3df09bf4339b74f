"""A profile requested by annotation enters the status once and ends there as written or failed."""

import json
from typing import Any

import pytest

from grpo_operator.api.messages import ProfileReport
from grpo_operator.api.v1alpha1.profile_status import ProfileState
from grpo_operator.api.v1alpha1.status import GRPOJobStatus
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.planner.resolve import resolve
from grpo_operator.plan.status.grpojob import job_status, layout_status
from grpo_operator.plan.status.profiles import acceptance, profile_event, profile_orders
from support.objects import NOW, job, pool_of, running, spec_of

LAYOUT = layout_status(resolve(spec_of(job()), pool_of(spec_of(job()))))
ANNOTATION, ACCEPTED = "rl.grpo.dev/profile", "rl.grpo.dev/profile-accepted"


class Cluster:
    """A job in an API server: annotations and status change only by what the operator writes."""

    def __init__(self, **spec: Any) -> None:
        self.job = job(**spec)
        self.job["metadata"] |= {"resourceVersion": "1", "annotations": {}}

    def annotate(self, value: str) -> None:
        self._write({ANNOTATION: value})

    def accept(self) -> bool:
        change = acceptance(self.job)
        self._write(change or {})
        return change is not None

    def report(self, observed: Observed) -> GRPOJobStatus:
        spec = spec_of(self.job)
        status = job_status(self.job, spec, LAYOUT, pool_of(spec), observed, NOW)
        self.job["status"] = status.wire()
        return status

    def _write(self, change: dict[str, str | None]) -> None:
        meta = self.job["metadata"]
        merged = {**meta["annotations"], **change}
        meta["annotations"] = {name: value for name, value in merged.items() if value is not None}
        meta["resourceVersion"] = str(int(meta["resourceVersion"]) + 1)


def asked(text: str, **spec: Any) -> Cluster:
    cluster = Cluster(**spec)
    cluster.annotate(text)
    cluster.accept()
    return cluster


def _reporting(identity: str, state: str, **fields: Any) -> Observed:
    return running(profiles=[ProfileReport(id=identity, state=ProfileState(state), **fields)])


def test_a_request_is_recorded_once_and_its_annotation_removed() -> None:
    cluster = asked("torch ranks=1")
    assert ANNOTATION not in cluster.job["metadata"]["annotations"]
    (entry,) = cluster.report(running()).profiles or []
    assert (entry.state, entry.tool, entry.target) == ("Requested", "torch", "trainer")
    assert entry.request == "torch ranks=1" and entry.requested_at == NOW
    assert not cluster.accept()
    assert cluster.report(running()).profiles == [entry]


def test_an_operator_that_restarts_between_the_writes_loses_and_repeats_nothing() -> None:
    cluster = asked("torch")
    cluster.annotate("py-spy")
    assert not cluster.accept(), "the first request is not in the status yet"
    (first,) = cluster.report(running()).profiles or []
    assert cluster.accept()
    entries = cluster.report(running()).profiles or []
    assert [entry.request for entry in entries] == ["torch", "py-spy"]
    assert entries[0] == first and entries[1].id != first.id


def test_the_same_value_again_is_another_request() -> None:
    cluster = asked("torch")
    cluster.report(running())
    cluster.annotate("torch")
    assert cluster.accept()
    ids = [entry.id for entry in cluster.report(running()).profiles or []]
    assert len(set(ids)) == 2


@pytest.mark.parametrize("marker", ["{", "null", '{"id": "a", "job": "another-job", "request": "torch"}'])
def test_a_marker_that_was_edited_or_copied_from_another_job_counts_as_none(marker: str) -> None:
    cluster = Cluster()
    cluster.job["metadata"]["annotations"] = {ACCEPTED: marker}
    assert cluster.report(running()).profiles is None
    cluster.annotate("torch")
    assert cluster.accept() and len(cluster.report(running()).profiles or []) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("perf", "'perf' is no tool"),
        ("x" * 5000, "more than 1024 characters"),
        ("torch ranks=7", "the job has 2 trainer ranks, so it has no rank 7: use ranks below 2"),
        ("nsight", "create the job with spec.observability.profile.tool: nsight"),
    ],
)
def test_what_cannot_be_served_fails_with_a_warning_and_is_not_sent(text: str, reason: str) -> None:
    cluster = asked(text)
    status = cluster.report(running())
    (entry,) = status.profiles or []
    assert entry.state == "Failed" and reason in (entry.message or "") and entry.finished_at == NOW
    assert profile_orders(status.profiles, running()) == []
    event = profile_event({}, status.wire())
    assert event is not None and event.warning and event.reason == "ProfileFailed" and reason in event.message


def test_the_controller_is_sent_what_it_does_not_have() -> None:
    cluster = asked("torch steps=2")
    status = cluster.report(running())
    (order,) = profile_orders(status.profiles, running())
    assert order.request.steps == 2
    assert json.loads(json.dumps(order.wire()))["request"]["steps"] == 2
    assert profile_orders(status.profiles, Observed()) == []
    assert profile_orders(status.profiles, _reporting(order.id, "Requested")) == []


def test_the_status_follows_the_controller() -> None:
    cluster = asked("torch")
    (entry,) = cluster.report(running()).profiles or []
    status = cluster.report(_reporting(entry.id, "Recording", started_at=NOW))
    assert (status.profiles or [])[0].state == "Recording"
    before = status.wire()
    written = _reporting(entry.id, "Written", path="/store/x/profile", files=["a.json"], finished_at=NOW)
    after = cluster.report(written)
    (entry,) = after.profiles or []
    assert (entry.state, entry.path, entry.files) == ("Written", "/store/x/profile", ["a.json"])
    event = profile_event(before, after.wire())
    assert event is not None and event.reason == "ProfileWritten" and "/store/x/profile" in event.message
    assert profile_event(after.wire(), after.wire()) is None
    assert cluster.report(running()).profiles == [entry], "a later controller knows nothing of it"


def test_a_restart_of_the_controller_ends_a_recording_and_repeats_a_request() -> None:
    cluster = asked("torch")
    (entry,) = cluster.report(running()).profiles or []
    assert profile_orders(cluster.report(running()).profiles, running())
    cluster.report(_reporting(entry.id, "Recording"))
    cluster.report(Observed())
    (entry,) = cluster.report(running()).profiles or []
    assert entry.state == "Failed" and "controller was restarted" in (entry.message or "")


@pytest.mark.parametrize("state", ["Requested", "Recording"])
def test_the_end_of_the_job_ends_its_requests(state: str) -> None:
    cluster = asked("torch")
    (entry,) = cluster.report(running()).profiles or []
    report = ProfileReport(id=entry.id, state=ProfileState(state))
    (entry,) = cluster.report(running("Succeeded", profiles=[report])).profiles or []
    assert entry.state == "Failed" and "the job ended" in (entry.message or "")


def test_the_newest_ten_are_kept() -> None:
    cluster = Cluster()
    for number in range(1, 14):
        cluster.annotate(f"torch steps={number}")
        assert cluster.accept()
        cluster.report(running())
    kept = [entry["request"] for entry in cluster.job["status"]["profiles"]]
    assert kept == [f"torch steps={number}" for number in range(4, 14)]
