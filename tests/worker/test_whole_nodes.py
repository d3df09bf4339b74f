"""Nodes of a job with real ranks and engines are lost, and the memory of one runs out: no bit changes.

One job has all faults, one after the other; it is compared with one that has none.
"""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from support.at_points import TOKENS, Fault
from support.host_pods import until
from support.machines import Machines, machines
from support.whole_job import Outcome, WholeJob, whole_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # two engines, one of two hosts, and two jobs
STEPS = 14
AGENT_MEBIBYTES = 512
# Seconds on two cores that run everything.
KILLED, ONE_STEP, RECOVERY, SERVES_AGAIN = 30.0, 120.0, 300.0, 400.0
GENERATES = Fault(TOKENS, 11, 1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Ray's head, two hosts with a rank each, an engine, and an engine of two hosts."""
    engine = {"max_total_tokens": 16384}
    folder, several = tmp_path_factory.mktemp("machines"), engine | {"hosts": 2}
    with machines(folder, engine, several, ranks=(0, 1, 1), agent_memory=AGENT_MEBIBYTES) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(running: Machines, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    with whole_job(running, tmp_path_factory.mktemp("undisturbed"), STEPS, memory=True) as job:
        outcome = job.finish(900)
        assert not job.notes("ends") and len(outcome.weights) == STEPS
        return outcome


@pytest.fixture(scope="module")
def job(
    running: Machines, undisturbed: Outcome, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WholeJob]:
    folder = tmp_path_factory.mktemp("disturbed")
    with whole_job(running, folder, STEPS, [GENERATES], memory=True) as job:
        yield job


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """Return what was seen while the job met its faults."""
    return {}


@pytest.fixture(scope="module")
def disturbed(job: WholeJob, facts: dict[str, Any]) -> Outcome:
    """Lead the job through all faults; return its results."""
    job.wait(5, 600)
    _exhaust_memory(job, facts)
    _lose_both_holders(job, facts)
    _lose_a_host_of_an_engine(job, facts)
    return job.finish(300)


def _exhaust_memory(job: WholeJob, facts: dict[str, Any]) -> None:
    """Let the kernel kill an agent that keeps copies; then kill a rank before the agent is back."""
    pod = job.machines.trainers[-1]
    assert pod.limit is not None and pod.limit.kills == 0
    began = time.monotonic()
    pod.limit.exhaust(pod.agent.pid)
    facts["kernel"] = pod.agent.wait(KILLED), pod.limit.kills, time.monotonic() - began
    facts["without agent"] = job.wait(7, 2 * ONE_STEP)
    job.allow(8)  # a loop that may not begin a step notices nothing
    os.kill(job.status()["trainers"][0]["pid"], signal.SIGKILL)
    facts["without copies"] = _restored(job), job.wait(8, RECOVERY)
    pod.start_agent()


def _lose_both_holders(job: WholeJob, facts: dict[str, Any]) -> None:
    """Kill both training pods at once: no memory is left that has a rank's state."""
    job.wait(10, 2 * ONE_STEP)
    _, *pods = job.machines.trainers
    job.allow(11)
    for pod in pods:
        pod.end()
    for pod in pods:
        pod.start()
    facts["both holders"] = _restored(job)


def _restored(job: WholeJob) -> dict[str, Any]:
    """Wait until the job has restored its state; return what it reports of it."""
    known, began = len(job.notes("restores")), time.monotonic()
    until(lambda: len(job.notes("restores")) > known, RECOVERY, job.last_words)
    return dict(job.status()["restored"]) | {"seconds": time.monotonic() - began}


def _lose_a_host_of_an_engine(job: WholeJob, facts: dict[str, Any]) -> None:
    """Kill everything of an engine's second host while the engine generates, and while it loads weights."""
    first, (second,) = job.machines.engines[1], job.machines.further
    for step in (GENERATES.step, GENERATES.step + 1):
        before = first.status()["restarts"]
        if step == GENERATES.step:
            job.allow(step)
            job.await_witness(GENERATES, ONE_STEP)
        else:
            _await_update(job, step)
        began = time.monotonic()
        second.end()
        second.start_agent()
        facts[f"step {step}"] = job.wait(step, 2 * ONE_STEP)
        until(lambda: first.status().get("restarts", 0) > before, SERVES_AGAIN)  # noqa: B023
        until(lambda: first.status().get("state") == "SERVING", SERVES_AGAIN, first.last_words)
        facts[f"after step {step}"] = time.monotonic() - began


def _await_update(job: WholeJob, step: int) -> None:
    """Allow a step, and wait until the engine begins to load the weights after it."""
    log = job.machines.engines[1].agent_log
    with log.open() as lines:
        lines.seek(0, os.SEEK_END)
        job.allow(step)
        deadline = time.monotonic() + ONE_STEP
        while ": prepare" not in lines.readline():
            assert time.monotonic() < deadline, "no update was seen"
            time.sleep(0.001)


@pytest.mark.fault(
    row="23",
    point="the memory limit of an agent that keeps copies of both ranks is used up, and a rank dies "
    "before the agent is back",
    witness="SIGKILL by the kernel, counted; the state comes from the store",
    bound="killed in 30 s, steps go on, the interrupted step ends in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, and its engines' weights, "
    "bitwise",
)
def test_the_kernel_kills_the_agent_that_keeps_copies(
    disturbed: Outcome, undisturbed: Outcome, facts: dict[str, Any]
) -> None:
    code, kills, seconds = facts["kernel"]
    assert code == -signal.SIGKILL and kills == 1 and seconds < KILLED
    restored, replayed = facts["without copies"]
    assert (restored["step"], restored["source"]) == (4, "store")
    assert restored["seconds"] + replayed < RECOVERY
    disturbed.same_as(undisturbed)


@pytest.mark.fault(
    row="6",
    point="SIGKILL of all processes of both training pods; their memory is lost",
    witness="the state comes from the store, from the step before the newest in memory",
    bound="restored in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, and its engines' weights, "
    "bitwise",
)
def test_two_nodes_are_lost_that_held_each_others_copies(
    disturbed: Outcome, undisturbed: Outcome, facts: dict[str, Any]
) -> None:
    restored = facts["both holders"]
    assert (restored["step"], restored["source"]) == (8, "store")
    assert restored["seconds"] < RECOVERY
    disturbed.same_as(undisturbed)


@pytest.mark.fault(
    row="12",
    point="SIGKILL of server and agent on the second host of an engine that generates, and of one "
    "that loads weights",
    witness="file written while it generates; its agent's log; restarts counted",
    bound="the step ends in 240 s with another engine; it serves again in 400 s",
    compared="samples, losses and weights of all steps of an undisturbed run, and its engines' weights, "
    "bitwise",
)
def test_a_host_of_an_engine_is_lost_while_it_generates_and_while_it_loads(
    disturbed: Outcome, undisturbed: Outcome, facts: dict[str, Any]
) -> None:
    for step in (GENERATES.step, GENERATES.step + 1):
        assert facts[f"step {step}"] < 2 * ONE_STEP, "the other engine did not go on"
        assert facts[f"after step {step}"] < SERVES_AGAIN
    disturbed.same_as(undisturbed)
    print(facts)
