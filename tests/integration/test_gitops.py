"""The health script for Argo CD, run by the Lua that Argo CD has, on statuses that the operator writes."""

import json
import subprocess
from typing import Any

import pytest

from grpo_devcluster.gobuild import binary, build_all
from grpo_devcluster.paths import REPO
from grpo_operator.plan.observed import Observed
from grpo_operator.plan.planner.resolve import resolve
from grpo_operator.plan.status.conditions import NO_PROBLEM, Problem
from grpo_operator.plan.status.grpojob import job_status, layout_status, refused_status
from grpo_operator.plan.status.rolloutpool import refused_pool
from support.objects import NOW, job, pool_of, running, spec_of

SCRIPT = (REPO / "helm" / "argocd" / "health.lua").read_text()
LAYOUT = layout_status(resolve(spec_of(job()), pool_of(spec_of(job()))))


@pytest.fixture(scope="module", autouse=True)
def operator() -> None:
    """These tests need none."""
    build_all(("glua",))


def _lua(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"[{json.dumps(k)}] = {_lua(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "{" + ", ".join(map(_lua, value)) + "}"
    return "nil" if value is None else json.dumps(value)


def _health(manifest: dict[str, Any]) -> tuple[str, str]:
    """Return status and message as Argo CD would show them."""
    program = (
        f"obj = {_lua(manifest)}\nhs = (function()\n{SCRIPT}\nend)()\nprint(hs.status)\nprint(hs.message)"
    )
    done = subprocess.run([str(binary("glua")), "-e", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    status, message = done.stdout.split("\n", 1)
    return status, message.strip()


def _reported(observed: Observed, blocked: Problem = NO_PROBLEM, **spec: Any) -> dict[str, Any]:
    manifest = job(**spec)
    read = spec_of(manifest)
    status = job_status(manifest, read, LAYOUT, pool_of(read), observed, NOW, blocked)
    return manifest | {"status": status.wire()}


def test_a_job_without_a_status_is_progressing() -> None:
    assert _health(job()) == ("Progressing", "")


def test_a_job_that_trains_is_healthy() -> None:
    assert _health(_reported(running()))[0] == "Healthy"


def test_a_job_that_has_ended_is_healthy_or_degraded() -> None:
    assert _health(_reported(running("Succeeded", step=120)))[0] == "Healthy"
    failed = _reported(running("Failed", message="no more restarts"))
    assert _health(failed) == ("Degraded", "no more restarts")


def test_a_job_that_starts_is_progressing() -> None:
    status, message = _health(_reported(Observed()))
    assert status == "Progressing" and message


def test_a_job_whose_children_are_refused_says_why() -> None:
    refused = _reported(running(), Problem("ApplyRefused", "exceeded quota: gpus"))
    assert _health(refused) == ("Degraded", "exceeded quota: gpus")


def test_a_refused_job_says_what_to_change_and_a_waiting_one_goes_on() -> None:
    for waits, expected in ((False, "Degraded"), (True, "Progressing")):
        status = refused_status(job(), "Infeasible", "needs 8 GPUs", NOW, waits=waits)
        assert _health(job() | {"status": status.wire()}) == (expected, "needs 8 GPUs")


def test_a_status_of_an_older_spec_does_not_count() -> None:
    manifest = _reported(running())
    manifest["metadata"]["generation"] += 1
    assert _health(manifest)[0] == "Progressing"


def test_a_suspended_job_is_suspended() -> None:
    assert _health(_reported(Observed(), suspend=True))[0] == "Suspended"


def test_a_pool_that_is_refused_is_degraded() -> None:
    pool = {"metadata": {"name": "pool", "generation": 1}}
    status = refused_pool(pool, "InvalidSpec", "replicas: 0", NOW).wire()
    assert _health(pool | {"status": status}) == ("Degraded", "replicas: 0")
