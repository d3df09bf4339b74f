"""Claims of jobs whose resources are planned."""

from typing import Any

import pytest

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.handlers.reconcilers import admission_round
from grpo_operator.handlers.reconcilers.admission_round import AdmissionRound
from grpo_operator.observe.cache import Cache
from grpo_operator.plan.capacity.admission import Claim
from grpo_operator.plan.planner.resolve import JobPlan, resolve
from grpo_operator.plan.status.grpojob import layout_status
from support.objects import job, pool_of, spec_of


def _claims(monkeypatch: pytest.MonkeyPatch, round_: AdmissionRound) -> dict[str, Claim]:
    found: list[Claim] = []

    def waiting(claims: list[Claim], nodes: Any, leaving: Any) -> dict[Any, str]:
        found.extend(claims)
        return {}

    monkeypatch.setattr(admission_round, "waiting", waiting)
    round_.update()
    return {claim.key.name: claim for claim in found}


def _job(name: str, **spec: Any) -> dict[str, Any]:
    made = job(**spec)
    times = {"creationTimestamp": "2026-01-01T00:00:00Z"}
    made["metadata"] = made["metadata"] | times | {"name": name, "uid": f"uid-{name}"}
    return made


def test_a_waiting_job_claims_what_its_plan_needs_and_a_refused_one_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = Cache()
    planned = _job("planned")
    refused = _job("refused", model={"path": "/models/x"})
    refused["spec"]["trainer"]["parallelism"] = {"auto": True}
    for made in (planned, refused):
        cache.jobs["default", made["metadata"]["name"]] = made
    claims = _claims(monkeypatch, AdmissionRound(cache))
    assert claims.keys() == {"planned"}
    memory = {request.pool: request.memory for request in claims["planned"].requests}
    assert memory["trainer"] > 2 * 2**30 and memory["rollout"] > 3 * 2**30


def test_a_waiting_job_is_planned_once_for_each_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(spec: GRPOJobSpec, pool: RolloutTemplate) -> JobPlan:
        calls.append(spec)
        return resolve(spec, pool)

    monkeypatch.setattr(admission_round, "resolve", counted)
    cache = Cache()
    cache.jobs["default", "one"] = waits = _job("one")
    round_ = AdmissionRound(cache)
    for _ in range(3):
        round_.update()
    assert len(calls) == 1
    waits["metadata"]["generation"] = 2
    round_.update()
    assert len(calls) == 2


def test_a_running_job_with_fields_of_a_newer_operator_holds_its_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = Cache()
    runs, new = _job("runs"), _job("new")
    for made in (runs, new):
        made["spec"]["fieldOfTomorrow"] = 1
        cache.jobs["default", made["metadata"]["name"]] = made
    layout = layout_status(resolve(spec_of(_job("any")), pool_of(spec_of(_job("any")))))
    runs["status"] = {"phase": "Training", "layout": layout.wire()}
    claims = _claims(monkeypatch, AdmissionRound(cache))
    assert claims.keys() == {"runs"}, "the other one is refused for the field"
