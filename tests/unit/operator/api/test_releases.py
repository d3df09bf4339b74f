"""Messages and job.json between releases: readers ignore what only a newer one knows, at every level."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from grpo_operator.api.gpu_messages import GpuFinding, GpuReport, Severity
from grpo_operator.api.job_config import JobConfig
from grpo_operator.api.messages import (
    AgentStatus,
    ControllerStatus,
    EngineHost,
    EngineSummary,
    MemoryCopies,
    Message,
    ProfileOrder,
    ProfileReport,
    RestoredState,
    TrainerProcess,
)
from grpo_operator.api.unknown_fields import unknown_fields
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.profile_request import ProfileRequest
from grpo_operator.api.v1alpha1.status import (
    DataStatus,
    EngineState,
    EngineStatus,
    HostState,
    RestartCounts,
    TokensStatus,
)
from grpo_operator.render.config_map import job_config_map
from grpo_worker.controller.config import load_job_config
from support.objects import job, pool_of, spec_of
from support.releases import ADDED, of_today, of_tomorrow

STALE = EngineState.STALE
MESSAGES = [
    ControllerStatus(
        restored=RestoredState(step=1, source="store"),
        restarts=RestartCounts(job=1),
        memory_copies=MemoryCopies(step=3),
        trainers=[TrainerProcess(rank=0, address="10.0.0.1", pid=7)],
        tokens=TokensStatus(end=[1], pad=0, chat_template=True),
        data=DataStatus(rows=3),
        engines=[EngineSummary(name="e", address="a", state=STALE)],
        profiles=[ProfileReport(id="p")],
    ),
    AgentStatus(
        name="e",
        state=STALE,
        hosts=[EngineHost(host=0, pod="e", state=HostState.RUNNING)],
        versions={"torch": "2"},
    ),
    ProfileOrder(id="p", request=ProfileRequest()),
    GpuReport(
        gpus=8,
        findings=(GpuFinding(gpu="u", index=0, severity=Severity.SICK, reason="Xid", text="79", since=1),),
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_message_of_a_newer_release_is_read(message: Message) -> None:
    sent = of_tomorrow(message.wire())
    read = type(message).model_validate(sent)
    assert of_today(read.wire()) == message.wire()
    assert type(message).model_validate_json(json.dumps(sent)) == read


def _config(manifest: dict[str, Any], spec: GRPOJobSpec) -> str:
    return str(job_config_map(manifest, spec, "rollout", pool_of(spec))["data"]["job.json"])


def test_a_controller_reads_the_job_file_of_a_newer_operator(tmp_path: Any) -> None:
    today = _config(job(), spec_of(job()))
    (tmp_path / "job.json").write_text(json.dumps(of_tomorrow(json.loads(today))))
    read = load_job_config(tmp_path / "job.json")
    assert of_today(read.wire()) == json.loads(today)


def test_a_job_file_without_newer_fields_is_complete() -> None:
    """The fields of the first release: whatever is added later needs a default."""
    first = {
        "name": "a", "namespace": "b", "spec": job()["spec"], "rolloutService": "s", "minAvailable": 1,
        "fp8": False, "weightPath": {}, "writer": "a-1", "store": "/store/a",
    }  # fmt: skip
    assert JobConfig.model_validate(first).engines == 1


def test_an_older_operator_passes_on_the_fields_that_it_does_not_know() -> None:
    manifest = job()
    manifest["spec"]["trainer"][ADDED] = 1
    manifest["spec"]["rollout"]["template"]["engine"][ADDED] = 2
    manifest["spec"][ADDED] = 3
    spec = GRPOJobSpec.of_any_release(manifest["spec"])
    written = json.loads(_config(manifest, spec))["spec"]
    assert written["trainer"][ADDED] == 1 and written["rollout"]["template"]["engine"][ADDED] == 2
    assert unknown_fields(spec, "spec") == [
        f"spec.{ADDED}", f"spec.trainer.{ADDED}", f"spec.rollout.template.engine.{ADDED}",
    ]  # fmt: skip


def test_unknown_fields_of_lists_are_named_and_kept() -> None:
    body = of_tomorrow(MESSAGES[1].wire()["hosts"])
    host = {"pod": "e", "role": "leader"} | body[0]
    data = {"name": "e", "state": "STALE", "hosts": [host]}
    status = EngineStatus.of_any_release(data)
    assert unknown_fields(status, "engine") == [f"engine.hosts[0].{ADDED}"]
    assert status.wire()["hosts"][0][ADDED] == "new"


def test_users_get_an_error_for_a_field_that_does_not_exist() -> None:
    body = job()["spec"] | {ADDED: 1}
    with pytest.raises(ValidationError, match=ADDED):
        GRPOJobSpec.model_validate(body)
