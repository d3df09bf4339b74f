"""A lost training pod with and without a spare one: the same weights, and how long the loss lasts."""

import time
from typing import Any

import pytest

from grpo_devcluster.follow import JobView
from grpo_devcluster.report import load
from grpo_devcluster.results import record_from_test
from support.faults import kill_container, report, uids, until, wait_step
from support.jobs import ENDED, Start

pytestmark = pytest.mark.slow  # three runs of jobs, one after the other: six minutes
STEPS, LOST_AT = 24, 7
STORE = {"path": "/var/lib/grpo-devcluster/data"}
CHECKPOINT = {"store": STORE, "everySteps": 20, "memory": {"everySteps": 1}}


def _end(job: JobView, restarts: int) -> list[dict[str, Any]]:
    """Wait for the end; return the records of all steps."""
    status = job.wait(ENDED, 600)
    assert status["phase"] == "Succeeded" and status["restarts"] == {"job": 0, "infrastructure": restarts}
    records = load(job.store())
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")
    return records


def _lose_a_pod(job: JobView) -> tuple[float, set[str], set[str]]:
    """Kill the pod of a rank; return the seconds until the next new step, and its pods before and after."""
    wait_step(job, LOST_AT)
    ranks = {trainer["address"] for trainer in report(job)["trainers"]}
    victim = next(pod for pod in job.pods("trainer") if pod["status"]["podIP"] in ranks)
    step, started = report(job)["step"], time.monotonic()
    kill_container(victim, "ray-worker")
    until("the loss is counted", lambda: report(job)["restarts"]["infrastructure"] == 1, 60, every=0.1)
    wait_step(job, step + 1, 240)
    seconds = time.monotonic() - started
    after = {trainer["address"] for trainer in report(job)["trainers"]}
    assert victim["status"]["podIP"] in ranks - after, "the fault hit no rank"
    assert report(job)["restored"]["source"] == "memory"
    return seconds, ranks, after


def _same_bits(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        for key in ("step", "actor/loss", "actor/grad_norm", "critic/score/mean", "weights"):
            assert mine[key] == theirs[key], f"step {mine['step']}: {key}"


def test_a_spare_pod_takes_over_from_a_lost_one(start: Start) -> None:
    calm = _end(start("calm", steps=STEPS, checkpoint=CHECKPOINT), 0)
    without = start("no-spare", steps=STEPS, checkpoint=CHECKPOINT)
    seconds_without, _, _ = _lose_a_pod(without)
    _same_bits(_end(without, 1), calm)

    job = start("spare", steps=STEPS, checkpoint=CHECKPOINT, spares=1)
    until("the spare is ready", lambda: job.status().get("trainReady") == "2/2 +1", 300)
    before = {pod["status"]["podIP"]: pod["metadata"]["name"] for pod in job.pods("trainer")}
    warm = until("the spare is warm", lambda: _warm(job), 120)
    seconds, first, second = _lose_a_pod(job)
    assert second <= before.keys() and len(second - first) == 1, "a new pod runs ranks, not the spare"
    known = set(before.values())
    until("the replacement is the spare", lambda: job.status().get("trainReady") == "2/2 +1", 120)
    assert len(uids(job, "trainer").keys() - known) == 1
    assert {trainer["address"] for trainer in report(job)["trainers"]} == second, "the gang has moved again"
    goodput = job.status()["goodput"]["gpuSeconds"]
    assert 0 < goodput["spare"] <= sum(goodput.values()) / 3
    _same_bits(_end(job, 1), calm)
    print(warm, f"recovery with a spare {seconds:.1f} s, without {seconds_without:.1f} s")
    record_from_test(
        "demo",
        {
            "recovery_seconds_spare": round(seconds, 1),
            "recovery_seconds_no_spare": round(seconds_without, 1),
        },
    )


def _warm(job: JobView) -> str:
    (pod,) = job.pods("controller")
    log = job.kubectl("logs", pod["metadata"]["name"], "-c", "controller")
    return next((line for line in log.splitlines() if "is warm: its imports took" in line), "")
