"""The operator is upgraded and downgraded while a job runs in real pods of the older release."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from grpo_devcluster.follow import JobView
from grpo_devcluster.gobuild import binary
from grpo_devcluster.install import NAMESPACE, install_operator
from grpo_operator.client import GRPOClient
from support.faults import report, step_of, uids, until, wait_step
from support.jobs import CALM, ENDED, Start
from support.older_release import WITH_PODS, install, unpack
from support.runs import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # images, a job, and a calm one beside it
MORE = 3  # steps that show that a job goes on


def _helm(kubeconfig: Path, *arguments: str) -> None:
    command = [str(binary("helm")), f"--kubeconfig={kubeconfig}", f"--namespace={NAMESPACE}", *arguments]
    subprocess.run(command, check=True)


def _images(job: JobView) -> set[str]:
    """Return the images of the job's own pods."""
    containers = [one for pod in job.pods() for one in pod["spec"]["containers"]]
    return {str(one["image"]) for one in containers}


def _goes_on(job: JobView, before: dict[str, str]) -> None:
    """Check that the job makes steps in the same pods, and that the operator follows it."""
    step = step_of(job) + MORE
    wait_step(job, step)
    until("its status follows", lambda: (job.status().get("step") or 0) >= step, 60)
    assert uids(job) == before and report(job)["restarts"] == {"job": 0, "infrastructure": 0}


def _suspend_and_resume(job: JobView, images: set[str]) -> None:
    """Check that the operator of another release stops the job and starts it with its images."""
    job.kubectl("patch", "grpojob", job.name, "--type=merge", "-p", '{"spec":{"suspend":true}}')
    status = job.wait(frozenset({"Suspended"}), 180)
    assert not job.pods() and status["lastCheckpoint"]["step"] == status["step"]
    job.kubectl("patch", "grpojob", job.name, "--type=merge", "-p", '{"spec":{"suspend":false}}')
    wait_step(job, status["step"] + 1)
    assert _images(job) == images, "the pods are those of the release that accepted the job"


def test_a_job_of_the_older_release_outlives_both_changes(
    kubeconfig: Path, chart_values: dict[str, Any], start: Start, tmp_path: Path, calm: Outcome
) -> None:
    older = unpack(tmp_path / "older", commit=WITH_PODS, parts=())
    install(older.root)
    job = start("kept", steps=CALM)
    wait_step(job, MORE)
    before, images, layout = uids(job), _images(job), job.status()["layout"]
    assert not images & set(chart_values["images"].values()), "pods of the older release"

    install_operator(kubeconfig, chart_values)
    _goes_on(job, before)
    _suspend_and_resume(job, images)
    before = uids(job)
    seen = GRPOClient("default", kubeconfig=str(kubeconfig)).metrics(job.name)
    assert [line["step"] for line in seen[:MORE]] == list(range(1, MORE + 1)), "read from older pods"

    # The newer CRDs stay, as docs/guides/upgrades.md says.
    _helm(kubeconfig, "rollback", "grpo-operator", "--wait", "--timeout=3m")
    _goes_on(job, before)
    assert job.status()["layout"] == layout

    install_operator(kubeconfig, chart_values)
    _goes_on(job, before)
    status = job.wait(ENDED, 900)
    assert status["phase"] == "Succeeded", json.dumps(status)
    Outcome.of(job.store(), CALM).assert_same(calm)
