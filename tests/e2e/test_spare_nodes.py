"""A training pod is lost with a spare one beside it, then together with it: the weights stay the same."""

import time
from typing import Any, NamedTuple

import pytest

from grpo_devcluster.follow import JobView
from grpo_devcluster.report import load
from grpo_devcluster.results import record_from_test
from support.faults import kill_container, report, until, wait_step
from support.jobs import ENDED, Start
from support.runs import assert_same_steps

pytestmark = pytest.mark.slow  # two runs of jobs, one after the other: five minutes on a quiet machine
STEPS, PATIENCE = 24, 900
STORE = {"path": "/var/lib/grpo-devcluster/data"}
CHECKPOINT = {"store": STORE, "everySteps": 20, "memory": {"everySteps": 1}}


class Loss(NamedTuple):
    """Loss of pods. ``seconds``: until the next new step. ``before``, ``after``: addresses of the ranks."""

    seconds: float
    before: set[str]
    after: set[str]


@pytest.mark.fault(
    row="5,6",
    point="SIGKILL of a training pod's container, then of one and of the spare pod at once",
    witness="the restart is counted, the ranks are in other pods, restored from memory",
    bound="counted in 120 s, next step in 900 s",
    compared="every step's loss, gradient norm, score and weights of a calm run, bitwise",
    partial="containers die, nodes stay; the other holder of the state lives",
)
def test_a_spare_pod_takes_over_from_a_lost_one(start: Start) -> None:
    job = start("spare", steps=STEPS, checkpoint=CHECKPOINT, spares=1, engines=1)
    wait_step(job, 4, PATIENCE)
    until("the spare is ready", lambda: _ready(job) == "2/2 +1", 120)
    warm = until("the spare is warm", lambda: _warm(job), 120)
    pods = _addresses(job)
    (spare,) = pods - _ranks(job)
    with_spare = _lose(job, 1, only_ranks=True)
    assert spare in with_spare.after <= pods, "a new pod runs ranks, not the spare"
    until("the replacement is the spare", lambda: _ready(job) == "2/2 +1", 240)
    assert len(_addresses(job) - pods) == 1
    assert _ranks(job) == with_spare.after, "the gang has moved again"

    pods = _addresses(job)
    without = _lose(job, 2, only_ranks=False)
    assert without.after - pods, "the ranks needed a new pod"
    spent = job.status()["goodput"]["gpuSeconds"]
    assert 0 < spent["spare"] <= sum(spent.values()) / 3
    disturbed = _end(job, 2)
    calm = _end(start("calm", steps=STEPS, checkpoint=CHECKPOINT, engines=1), 0)
    assert_same_steps(disturbed, calm)
    seconds = [round(loss.seconds, 1) for loss in (with_spare, without)]
    print(warm, f"next step after {seconds[0]} s with a spare, after {seconds[1]} s without")
    names = ("recovery_seconds_with_spare", "recovery_seconds_without_spare")
    record_from_test("demo", dict(zip(names, seconds, strict=True)))


def _lose(job: JobView, restarts: int, only_ranks: bool) -> Loss:
    """Kill the pod of a rank, and unless ``only_ranks`` the spare pod too; wait for the next new step."""
    before = _ranks(job)
    pods = job.pods("trainer")
    (*_, rank) = sorted(pods, key=lambda pod: pod["status"]["podIP"] in before)
    spares = [pod for pod in pods if pod["status"]["podIP"] not in before]
    step, started = report(job)["step"], time.monotonic()
    for victim in [rank, *([] if only_ranks else spares)]:
        kill_container(victim, "ray-worker")
    counted = f"restart {restarts} is counted"
    until(counted, lambda: report(job)["restarts"]["infrastructure"] == restarts, 120, every=0.1)
    wait_step(job, step + 1, PATIENCE)
    seconds = time.monotonic() - started
    assert report(job)["restored"]["source"] == "memory"
    after = _ranks(job)
    assert rank["status"]["podIP"] in before - after, "the fault hit no rank"
    return Loss(seconds, before, after)


def _ranks(job: JobView) -> set[str]:
    return {trainer["address"] for trainer in report(job)["trainers"]}


def _addresses(job: JobView) -> set[str]:
    return {pod["status"]["podIP"] for pod in job.pods("trainer")}


def _ready(job: JobView) -> str:
    return str(job.status().get("trainReady"))


def _warm(job: JobView) -> str:
    (pod,) = job.pods("controller")
    log = job.kubectl("logs", pod["metadata"]["name"], "-c", "controller")
    return next((line for line in log.splitlines() if "is warm: its imports took" in line), "")


def _end(job: JobView, restarts: int) -> list[dict[str, Any]]:
    """Wait for the end; return the records of all steps."""
    status = job.wait(ENDED, PATIENCE)
    assert status["phase"] == "Succeeded" and status["restarts"] == {"job": 0, "infrastructure": restarts}
    records = load(job.store())
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")
    return records
