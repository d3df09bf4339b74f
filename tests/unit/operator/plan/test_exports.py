"""Exports of checkpoints that an annotation asks for: taken once, refused by name, followed to their end."""

from typing import Any

import pytest

from grpo_operator.api.names import EXPORT, EXPORT_ANNOTATION, export_pod
from grpo_operator.api.v1alpha1.export_request import parse_request, request_text
from grpo_operator.api.v1alpha1.export_status import ExportState, ExportStatus
from grpo_operator.observe.watched_kinds import reduced
from grpo_operator.plan.exports import (
    export_event,
    export_status,
    exporter,
    own_pods,
    surplus_exporters,
)
from support.objects import NOW, job, pod, spec_of

LATER = "2026-11-27T13:00:00Z"
FOLDER = "/store/default-tiny-moe-12345678"


def _job(request: str | None = None, step: int | None = 20, **spec: Any) -> dict[str, Any]:
    made = job(**spec)
    if request is not None:
        made["metadata"]["annotations"] = {EXPORT_ANNOTATION: request}
    if step is not None:
        made["status"] = {"lastCheckpoint": {"step": step, "location": "/x", "complete": True}}
    return made


def _asked(request: str, step: int | None = 20, **spec: Any) -> ExportStatus:
    made = _job(request, step, **spec)
    status = export_status(made, spec_of(made), None, (), "", NOW)
    assert status is not None
    return status


def _pod(request: str, phase: str, **status: Any) -> dict[str, Any]:
    made = pod(EXPORT)
    made["metadata"]["name"] = export_pod(job(), request)
    return reduced("pods", made | {"spec": {}, "status": {"phase": phase} | status})


def _next(old: ExportStatus, *pods: dict[str, Any], refused: str = "") -> ExportStatus:
    made = _job(old.request)
    status = export_status(made, spec_of(made), old, pods, refused, LATER)
    assert status is not None
    return status


def test_the_newest_checkpoint_is_exported_unless_a_step_is_given() -> None:
    asked = _asked("at=12:00")
    assert (asked.state, asked.step, asked.path) == (
        ExportState.RUNNING,
        20,
        f"{FOLDER}/export/checkpoint-20",
    )
    fp8 = _asked("step=5 quantization=fp8-block128")
    assert (fp8.step, fp8.path) == (5, f"{FOLDER}/export/checkpoint-5-fp8-block128")
    assert _asked("name=final").path == f"{FOLDER}/export/final"
    bucket = {"store": {"uri": "s3://runs/x", "endpoint": "http://s3:9000"}}
    assert _asked("step=5", checkpoint=bucket).path == (
        "s3://runs/x/default-tiny-moe-12345678/export/checkpoint-5"
    )


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ("", "the value is empty: write FIELD=VALUE"),
        ("newest", "'newest' has no value: write FIELD=VALUE"),
        ("step=1 step=2", "'step' is given twice"),
        ("step=x", f"{EXPORT_ANNOTATION}.step: Input should be a valid integer"),
        ("quantization=fp4", f"{EXPORT_ANNOTATION}.quantization: Input should be 'none' or 'fp8-block128'"),
        ("name=../x", f"{EXPORT_ANNOTATION}.name: String should match pattern"),
        ("name=" + "x" * 300, "has more than 253 characters: shorten it"),
    ],
)
def test_bad_requests_fail_by_field(request_: str, said: str) -> None:
    status = _asked(request_)
    assert status.state is ExportState.FAILED and said in str(status.message)
    assert status.finished_at == NOW


def test_a_job_without_a_checkpoint_cannot_be_exported() -> None:
    status = _asked("at=1", step=None)
    assert status.state is ExportState.FAILED
    assert "no complete checkpoint: ask again when status.lastCheckpoint is there" in str(status.message)


def test_each_value_of_the_annotation_is_one_request() -> None:
    asked = _asked("step=5")
    done = _next(asked, _pod("step=5", "Succeeded"))
    assert (done.state, done.finished_at) == (ExportState.WRITTEN, LATER)
    assert _next(done, _pod("step=5", "Running")) == done, "the same value asks for nothing"
    other = _job("step=10")
    again = export_status(other, spec_of(other), done, (), "", LATER)
    assert again is not None and (again.state, again.step) == (ExportState.RUNNING, 10)
    silent = _job(None)
    assert export_status(silent, spec_of(silent), done, (), "", LATER) == done, "its end stays to be read"
    assert export_status(silent, spec_of(silent), None, (), "", LATER) is None


def test_the_end_of_the_pod_is_the_end_of_the_export() -> None:
    asked = _asked("step=5")
    assert _next(asked) == asked, "its pod is created next"
    assert _next(asked, _pod("step=5", "Running")) == asked
    ended = {"exitCode": 1, "reason": "Error", "message": "INFO\nx: step 5 is not there: use 10"}
    failed = {"name": "controller", "ready": False, "restartCount": 0, "state": {"terminated": ended}}
    status = _next(asked, _pod("step=5", "Failed", containerStatuses=[failed]))
    assert status.state is ExportState.FAILED
    assert "x: step 5 is not there: use 10" in str(status.message)
    lost = _next(asked, _pod("step=5", "Failed"))
    assert lost.message == f"pod {export_pod(job(), 'step=5')} failed", "as when it was evicted"
    assert _next(asked, refused="quota").message == "quota"


def test_what_a_pod_waits_for_is_said_and_forgotten() -> None:
    asked = _asked("step=5")
    unschedulable = {
        "type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no memory",
    }  # fmt: skip
    waiting = _next(asked, _pod("step=5", "Pending", conditions=[unschedulable]))
    assert waiting.state is ExportState.RUNNING and "no memory" in str(waiting.message)
    assert _next(waiting, _pod("step=5", "Running")).message is None


def test_only_the_pod_of_a_running_export_stays() -> None:
    asked, one, other = _asked("step=5"), _pod("step=5", "Running"), _pod("step=1", "Running")
    pods = (pod("trainer"), one, other)
    assert own_pods(pods) == (pods[0],)
    assert exporter(job(), asked, pods) is one
    assert surplus_exporters(job(), asked, pods) == [other]
    done = _next(asked, _pod("step=5", "Succeeded"))
    assert surplus_exporters(job(), done, pods) == [one, other]
    assert surplus_exporters(job(), None, pods) == [one, other]
    going = {"metadata": one["metadata"] | {"deletionTimestamp": NOW}}
    assert surplus_exporters(job(), done, [going]) == []


def test_an_end_is_an_event() -> None:
    asked = _asked("step=5")
    done = _next(asked, _pod("step=5", "Succeeded"))
    before, after = {"export": asked.wire()}, {"export": done.wire()}
    event = export_event(before, after)
    assert event is not None and event.reason == "ExportWritten" and not event.warning
    assert event.message == f"the checkpoint of step 5 is in {FOLDER}/export/checkpoint-5"
    assert export_event(after, after) is None and export_event({}, before) is None
    refused = export_event(after, {"export": _asked("newest").wire()})
    assert refused is not None and refused.reason == "ExportFailed" and refused.warning


def test_the_command_line_writes_what_is_read() -> None:
    text = request_text(5, "fp8-block128", "", "2026-11-27T12:00:00Z")
    assert text == "step=5 quantization=fp8-block128 at=2026-11-27T12:00:00Z"
    assert parse_request(text).directory(5) == "checkpoint-5-fp8-block128"
    assert parse_request(request_text(None, "none", "final", "x")).directory(7) == "final"
    with pytest.raises(ValueError, match="quantization: Input should be 'none' or 'fp8-block128'"):
        request_text(5, "int4", "", "x")
