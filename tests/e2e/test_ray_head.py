"""A head whose state is in Redis is lost and comes back: no rank ends, and no bit of any step changes."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_devcluster.follow import JobView
from grpo_operator.api.names import GCS_PORT
from support.faults import kill_container, kill_rank, report, started, step_of, uids, until, wait_step
from support.jobs import CALM, ENDED, Start
from support.redis import HeadState, head_state
from support.runs import Outcome, recoveries

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # a job, and the calm one: ten minutes
KINDS = "rayclusters,jobs,pods,secrets"  # of what KubeRay removes with a cluster


@pytest.fixture(scope="module")
def redis(kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeadState]:
    with head_state(kubeconfig, tmp_path_factory.mktemp("redis") / "log") as redis:
        yield redis


@pytest.fixture(scope="module")
def job(start: Start, redis: HeadState, calm: Outcome) -> JobView:
    """A job with such a head. The calm one has ended: two at once would take too long."""
    assert redis.server.ask("dbsize") == "0"
    job = start("head-in-redis", steps=CALM, head=redis.head, restartPolicy={"backoffSeconds": 1})
    wait_step(job, 3, 900)
    assert int(redis.server.ask("dbsize")) > 0, "the head keeps its state elsewhere"
    return job


@pytest.mark.fault(
    row="ray-head",
    point="SIGKILL of the container of Ray's head, whose state is in Redis, twice within seconds",
    witness="its container has started again each time; its port is closed while steps end",
    bound="two steps in 120 s without a head; it listens again 120 s later; no attempt ends",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, at the end of "
    "the run",
)
def test_steps_go_on_while_the_head_is_away(job: JobView) -> None:
    seen, before = _kept(job), uids(job)
    first = _kill_head(job)
    second = until("another container", lambda: _running(job, but=first), 120)
    _kill_head(job)  # this time kubelet waits for ten seconds
    wait_step(job, step_of(job) + 2, 120)
    assert not _listens(job), "the head was back before the steps ended"
    until("a third container", lambda: _running(job, but=second), 120)
    until("the head listens", lambda: _listens(job), 120)
    wait_step(job, step_of(job) + 2, 120)
    assert _kept(job) == seen and uids(job) == before


@pytest.mark.fault(
    row="ray-head",
    point="the pod of Ray's head, whose state is in Redis, is deleted",
    witness="another pod with another address is the head",
    bound="it listens 180 s later, and two new steps end 120 s after that; no attempt ends",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, at the end of "
    "the run",
)
def test_a_head_with_another_address_takes_over(job: JobView) -> None:
    seen, before = _kept(job), uids(job, "controller", "trainer", "rollout")
    (first,) = job.pods("head")
    job.kubectl("delete", "pod", first["metadata"]["name"], "--wait")
    until("another head listens", lambda: _listens(job), 180)
    (second,) = job.pods("head")
    assert second["status"]["podIP"] != first["status"]["podIP"]
    wait_step(job, step_of(job) + 2, 120)
    assert _kept(job) == seen and uids(job, "controller", "trainer", "rollout") == before


@pytest.mark.fault(
    row="ray-head",
    point="SIGKILL of a rank's process after another head has read its state from Redis",
    witness="the restart is counted; the state comes from the store",
    bound="counted in 120 s, two new steps 400 s later",
    compared="every step's loss, gradient norm, score and weights, and the ledger, bitwise, at the end of "
    "the run",
)
def test_the_head_that_is_back_starts_ranks(job: JobView) -> None:
    before, restarts = uids(job), report(job)["restarts"]["infrastructure"]
    kill_rank(job)
    until("a restart", lambda: report(job)["restarts"]["infrastructure"] == restarts + 1, 120)
    wait_step(job, step_of(job) + 2, 400)
    restored = report(job)["restored"]
    assert restored["source"] == "store" and restored["step"] >= 5
    assert uids(job) == before


def test_the_steps_are_those_of_a_calm_run_and_nothing_is_left(
    job: JobView, redis: HeadState, calm: Outcome
) -> None:
    status = job.wait(ENDED, 900)
    assert status["phase"] == "Succeeded" and status["restarts"] == {"job": 0, "infrastructure": 1}
    assert len(recoveries(job.store())) == 1, "of the rank"
    outcome = Outcome.of(job.store(), CALM)
    (cluster,) = _named(job, "rayclusters")
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground", "--timeout=600s")
    until("all is removed", lambda: not _named(job, KINDS), 60)
    assert redis.server.ask("keys", f"*{cluster['metadata']['uid']}*") == "", "KubeRay left the head's state"
    outcome.assert_same(calm)


def _kept(job: JobView) -> dict[str, Any]:
    """Return what of the controller's report changes when ranks restart."""
    seen = report(job)
    return {key: seen[key] for key in ("attempt", "restarts", "trainers", "restored")}


def _kill_head(job: JobView) -> str:
    """Kill the head's container and return which run of it that was."""
    (head,) = job.pods("head")
    kill_container(head, "ray-head")
    return started(head, "ray-head")


def _running(job: JobView, but: str) -> str:
    """Return which run of the head's container there is; empty if there is none but ``but``."""
    (head,) = job.pods("head")
    now = started(head, "ray-head")
    return "" if now == but or now.endswith("None") else now


def _listens(job: JobView) -> bool:
    (head,) = job.pods("head")
    with socket.socket() as probe:
        return probe.connect_ex((head["status"]["podIP"], GCS_PORT)) == 0


def _named(job: JobView, kinds: str) -> list[dict[str, Any]]:
    """Return the objects of the job's RayCluster, or it itself."""
    found = json.loads(job.kubectl("get", kinds, "-o", "json"))["items"]
    return [one for one in found if one["metadata"]["name"].startswith(job.name)]
