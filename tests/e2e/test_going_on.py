"""Jobs that go on after their end, and jobs that start from another job's checkpoint, on real pods."""

import os
import shutil
from typing import Any

import pytest

from grpo_devcluster.follow import JobView
from grpo_devcluster.paths import JOB_DATA
from grpo_devcluster.report import load
from support.faults import until
from support.jobs import ENDED, Start, events

pytestmark = pytest.mark.slow  # five runs of jobs, one after the other: eight minutes


def _checkpoint(**resume_from: Any) -> dict[str, Any]:
    return {"store": {"path": str(JOB_DATA)}, "everySteps": 5, "keep": 2, "resumeFrom": resume_from}


def _succeeds(job: JobView, step: int) -> dict[str, Any]:
    status = job.wait(ENDED, 600)
    assert status["phase"] == "Succeeded" and status["step"] == step, status
    return status


def test_jobs_go_on_after_their_end_and_from_others(start: Start) -> None:
    """Check the jobs in the order of their lives: each needs the one before."""
    first = start("first", steps=6)
    _succeeds(first, 6)
    until("its pods are gone", lambda: not first.pods(), 120)
    _raise_the_total(first)
    _fork(start, first)
    _mend_and_resume(start, first)


def _raise_the_total(first: JobView) -> None:
    first.kubectl("patch", "grpojob", "first", "--type=merge", "-p", '{"spec":{"totalSteps":10}}')
    until("it goes on", lambda: first.status()["phase"] != "Succeeded", 60)
    status = _succeeds(first, 10)
    assert status["resumption"]["times"] == 1 and status["restarts"] == {"job": 0, "infrastructure": 0}
    assert status["weights"] == "v10" and status["attempt"] == 2
    assert [record["step"] for record in load(first.store())] == list(range(1, 11))
    assert "Resumed" in events(first)


def _fork(start: Start, first: JobView) -> None:
    """Check that a fork of the same job makes bitwise the steps that the job itself has made."""
    before = {file: file.stat().st_mtime_ns for file in first.store().rglob("*")}
    fork = start("fork", steps=10, checkpoint=_checkpoint(job="first", step=6))
    status = _succeeds(fork, 10)
    assert "step-00000006.attempt-" in status["resumedFrom"]["checkpoint"]
    own, others = load(fork.store()), load(first.store())
    assert [record["step"] for record in own] == [7, 8, 9, 10]
    assert [record["weights"] for record in own] == [record["weights"] for record in others[6:]]
    assert {file: file.stat().st_mtime_ns for file in first.store().rglob("*")} == before


def _mend_and_resume(start: Start, first: JobView) -> None:
    """Let a job fail for want of its source, supply it, and resume the job by annotation."""
    kept = JOB_DATA / "kept"
    checkpoint = _checkpoint(path="/store/kept", load="weights")
    job = start("mended", steps=2, checkpoint=checkpoint)
    status = job.wait(ENDED, 600)
    assert status["phase"] == "Failed"
    assert "/store/kept has no complete checkpoint" in job.kubectl("describe", "grpojob", job.name)
    shutil.copytree(first.store() / "checkpoints", kept, copy_function=os.link)
    job.kubectl("annotate", "grpojob", job.name, "rl.grpo.dev/resume=the folder is there")
    until("it goes on", lambda: job.status()["phase"] != "Failed", 120)
    status = _succeeds(job, 2)
    assert status["resumption"]["request"] == "the folder is there"
    assert "/store/kept has no complete checkpoint" in status["lastFailure"]
    assert [record["step"] for record in load(job.store())] == [1, 2]
