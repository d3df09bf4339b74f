"""An engine of two pods: SGLang with tensor parallel 2 over gloo. Every fault costs the whole engine, and
nothing else.
"""

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import yaml

from grpo_devcluster.follow import JobView
from grpo_devcluster.paths import REPO
from grpo_devcluster.report import load
from grpo_devcluster.results import record_from_test
from grpo_operator.api.names import ENGINE_PORT, HOST_INDEX
from support.faults import (
    AGENT_PORT,
    RESET,
    agent,
    cut_off,
    kill_container,
    report,
    step_of,
    uids,
    until,
    wait_step,
)
from support.jobs import ENDED, Start
from support.pod_keys import bearer

pytestmark = pytest.mark.slow  # two engines of two servers start and start again: many minutes
STEPS = 40
BACK_SECONDS = 400  # for two SGLang servers to start on two busy cores


@pytest.fixture(scope="module")
def job(start: Start) -> JobView:
    spec = yaml.safe_load((REPO / "manifests" / "tiny-moe.yaml").read_text())["spec"]
    template = spec["rollout"]["template"]
    engine = {"tensorParallel": 2, "nodesPerEngine": 2, "doubleBuffer": True}
    template |= {"replicas": 1, "engine": template["engine"] | engine}
    sync = {"timeoutSeconds": 30}
    job = start("two-hosts", steps=STEPS, rollout={"template": template}, weightSync=sync)
    wait_step(job, 2, 600)
    return job


def test_two_pods_are_one_engine_and_both_are_in_its_status(job: JobView) -> None:
    leader, worker = _hosts(job)
    (engine,) = until("the status shows both hosts", lambda: _engines_with_hosts(job), 30)
    roles = {host["pod"]: (host["role"], host["state"]) for host in engine["hosts"]}
    assert roles == {_name(leader): ("leader", "Running"), _name(worker): ("worker", "Running")}
    assert engine["name"] == _name(leader)
    until("both pods are ready", lambda: all(map(_ready, _hosts(job))), 30)
    records = load(job.store())
    assert records[-1]["weight_sync/link_failures"] == 0, "the weights did not come from the trainer ranks"
    log = job.kubectl("logs", _name(worker), "-c", "engine", "--tail=-1")
    assert "TP1] Weight version changed" in log, "the second host has received no weights"


@pytest.mark.fault(
    row="12",
    point="SIGKILL of one host's container of an engine of two pods",
    witness="states RESTARTING, STALE, SERVING; restart counts",
    bound="serves again in 300 s",
    compared="checksums of all ranks before and after",
    partial="the node stays; no second engine that goes on",
)
def test_a_killed_container_restarts_the_engine_with_the_same_weights_on_every_rank(job: JobView) -> None:
    _, worker = _hosts(job)
    before, restarts = uids(job), report(job)["restarts"]
    with _no_further_version(job):
        came_directly = _checksums(job)
        assert agent(_hosts(job)[0])["stagedVersion"] is None, "it did not come over the link"
        started = time.monotonic()
        kill_container(worker, "engine")
        states = _states_until_back(job)
        seconds = time.monotonic() - started
        fetched = _checksums(job)
    assert states == ["RESTARTING", "STALE", "SERVING"]
    assert came_directly == fetched and len(fetched[1]) == 2, "(version, checksums of each rank)"
    record_from_test("rehearsal", {"multi_host_engine_recovery_seconds": round(seconds, 1)})
    assert uids(job) == before and report(job)["restarts"] == restarts
    leader, worker = _hosts(job)
    assert (_restarts(leader), _restarts(worker)) == (0, 1), "the other host's container was killed too"
    log = job.kubectl("logs", _name(leader), "-c", "agent", "--tail=-1")
    ended = re.findall(r"round \w+ ended: (\S+): ", log)
    # The leader's server may notice the closed connections before the other container is back.
    assert len(ended) == 1 and ended[0] in (_name(leader), _name(worker)), "the error does not name a pod"


@pytest.mark.fault(
    row="12",
    point="one pod of an engine of two pods is deleted",
    witness="both pods are replaced",
    bound="both replaced in 60 s",
    partial="the node stays; weights are checked to be newer, not compared",
)
@pytest.mark.parametrize("host", [0, 1], ids=["leader", "worker"])
def test_a_killed_pod_takes_the_other_with_it_and_the_engine_comes_back(job: JobView, host: int) -> None:
    """The first pod has the engine's HTTP server and the agent that answers for the engine."""
    killed = _hosts(job)[host]
    with _no_further_version(job):
        weights = _checksums(job)
    before, restarts = uids(job, "trainer", "controller", "head"), report(job)["restarts"]
    old = uids(job, "rollout")
    job.kubectl("delete", "pod", _name(killed), "--wait=false")
    until("both pods are replaced", lambda: len(_new_pods(job, old)) == 2, 60)
    assert _states_until_back(job) == ["RESTARTING", "STALE", "SERVING"]
    until("the status shows the new hosts", lambda: _pods_in_status(job) == set(map(_name, _hosts(job))), 30)
    wait_step(job, step_of(job) + 1, 60)
    with _no_further_version(job):
        _assert_newer_on_both_ranks(_checksums(job), weights)
    assert uids(job, "trainer", "controller", "head") == before and report(job)["restarts"] == restarts


def test_weights_reach_both_hosts_through_memory_while_the_link_is_cut(job: JobView) -> None:
    leader, worker = _hosts(job)
    with _no_further_version(job):
        weights = _checksums(job)
    until("an engine without a copy in memory", lambda: agent(leader)["stagedVersion"] is None, 60)
    with cut_off(worker, job.pods("trainer"), RESET):
        step = step_of(job)
        wait_step(job, step + 3, 240)
        status = agent(leader)
        assert status["stagedVersion"] is not None, "the weights came over the link"
        until("the newest version", lambda: agent(leader)["weightVersion"] > step + 1, 30)
        with _no_further_version(job):
            through_memory = _checksums(job)
            assert agent(leader)["stagedVersion"] == through_memory[0] > step + 1
        _assert_newer_on_both_ranks(through_memory, weights)
    wait_step(job, step_of(job) + 2, 120)
    assert agent(leader)["restarts"] == 0


def test_the_job_ends_well(job: JobView) -> None:
    status = job.wait(ENDED, 300)
    assert status["phase"] == "Succeeded" and status["restarts"] == {"job": 0, "infrastructure": 0}
    (engine,) = job.pool()["engines"]
    assert engine["weightVersion"] == STEPS
    job.kubectl("delete", "grpojob", job.name, "--cascade=foreground")


def _hosts(job: JobView) -> list[dict[str, Any]]:
    """Return the pods of the engine that are not being deleted: leader, worker."""
    pods = [pod for pod in job.pods("rollout") if "deletionTimestamp" not in pod["metadata"]]
    return sorted(pods, key=lambda pod: int(pod["metadata"]["labels"][HOST_INDEX]))


def _new_pods(job: JobView, old: dict[str, str]) -> list[str]:
    return [name for pod in _hosts(job) if (name := _name(pod)) not in old and pod["status"].get("podIP")]


def _name(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["name"])


def _ready(pod: dict[str, Any]) -> bool:
    return all(status["ready"] for status in pod["status"]["containerStatuses"])


def _restarts(pod: dict[str, Any]) -> int:
    return sum(s["restartCount"] for s in pod["status"]["containerStatuses"] if s["name"] == "engine")


def _engines_with_hosts(job: JobView) -> list[dict[str, Any]]:
    return [engine for engine in job.pool().get("engines", []) if len(engine.get("hosts", [])) == 2]


def _pods_in_status(job: JobView) -> set[str]:
    return {entry["pod"] for engine in _engines_with_hosts(job) for entry in engine["hosts"]}


@contextlib.contextmanager
def _no_further_version(job: JobView) -> Iterator[None]:
    """Stop the trainer ranks after they have staged the version that the engine has just received."""
    (leader, _), trainers = _hosts(job), job.pods("trainer")
    headers = bearer(job.kubectl, job.get())
    pods = {pod["status"]["podIP"]: _name(pod) for pod in trainers}
    ranks = [(pods[rank["address"]], str(rank["pid"])) for rank in report(job)["trainers"]]
    served = agent(leader)["weightVersion"]

    def staged() -> bool:
        version = agent(leader)["weightVersion"]
        urls = [f"http://{address}:{AGENT_PORT}/v1/versions" for address in pods]
        return version not in (None, served) and all(
            str(version) in httpx.get(url, headers=headers, timeout=5).json() for url in urls
        )

    until("a new version", staged, 60, every=0.02)
    try:
        for pod, pid in ranks:
            job.exec(pod, "ray-worker", "kill", "-STOP", pid)
        yield
    finally:
        for pod, pid in ranks:
            job.exec(pod, "ray-worker", "kill", "-CONT", pid)


def _checksums(job: JobView) -> tuple[int, list[Any]]:
    """Return the version that the engine serves, and the checksums of the weights of each of its ranks."""
    (leader, _) = _hosts(job)
    key = job.exec(_name(leader), "engine", "cat", "/tmp/model/admin-key")
    url = f"http://{leader['status']['podIP']}:{ENGINE_PORT}/weights_checker"
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(url, json={"action": "checksum"}, headers=headers, timeout=30).json()
    return int(agent(leader)["weightVersion"]), [rank["checksums"] for rank in answer["ranks"]]


def _assert_newer_on_both_ranks(now: tuple[int, list[Any]], before: tuple[int, list[Any]]) -> None:
    """Check that the engine serves a newer version than ``before``, and that each rank has other weights."""
    assert now[0] > before[0] and len(now[1]) == len(before[1]) == 2, "(version, checksums of each rank)"
    for rank, (new, old) in enumerate(zip(now[1], before[1], strict=True)):
        assert new and new != old, f"rank {rank} still has the weights of version {before[0]}"


def _states_until_back(job: JobView) -> list[str]:
    """Wait until the engine is lost and serves again; return its states from the loss to SERVING."""

    def status() -> dict[str, Any]:
        return agent(_hosts(job)[0])

    until("the loss", lambda: status()["state"] == "RESTARTING", 60, every=0.1)
    until("the engine is back", lambda: status()["state"] == "SERVING", BACK_SECONDS, every=0.1)
    states: list[str] = status()["history"]
    lost = len(states) - 1 - states[::-1].index("RESTARTING")
    return states[lost : lost + 3]
