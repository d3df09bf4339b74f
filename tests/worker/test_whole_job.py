"""A job with real ranks, engines, agents and a reward server, each on a host of its own, meets faults.

One job has all faults, one after the other; it is compared with one that has none.
"""

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import pytest

from grpo_operator.api.names import CONTROLLER_PORT
from grpo_worker.weightsync.agent.agent import UNRESPONSIVE_SECONDS
from support.at_points import DIRECT, FREEZE, REWARD_DIES, REWARD_HANGS, UPDATE, WAVE, Fault
from support.engine_hosts import DEADLINE, EngineOnHost
from support.host_pods import until
from support.hosts import Host
from support.machines import LIVENESS_SECONDS, Machines, machines
from support.whole_job import HANG_SECONDS, Outcome, WholeJob, whole_job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]  # two engines, and two jobs with them
STEPS = 18
# Seconds on two cores that run everything.
DETECTION, RECOVERY, SERVES_AGAIN, NETWORK, PARKED = 30.0, 300.0, 300.0, 240.0, 300.0
# The agent calls a scheduler dead that has not answered for so long, and then its container is restarted.
LIVENESS = UNRESPONSIVE_SECONDS + DEADLINE + LIVENESS_SECONDS + 60
REWARD_DEATH, REWARD_HANG = Fault(REWARD_DIES, 2, 0), Fault(REWARD_HANGS, 3, 0)
UPDATES = [Fault(DIRECT, 4, 1), Fault(WAVE, 5, 0), Fault(UPDATE, 6, 1)]
AHEAD = (30.0, -30.0, 0.0)  # seconds of the clocks of the hosts of trainers, first and second engine
CLOCK_ERROR = 5.0  # seconds: dates in answers are whole seconds, and an answer takes time
NO_ENGINE = r"(no engine serves|\b0 of minAvailable=1 engines serve) version 14\b"
FROZEN = Fault(FREEZE, 16, 1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    engine = {"max_total_tokens": 16384}
    with machines(tmp_path_factory.mktemp("machines"), engine, engine) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(running: Machines, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    with whole_job(running, tmp_path_factory.mktemp("undisturbed"), STEPS) as job:
        outcome = job.finish(900)
        assert not job.notes("ends") and len(outcome.weights) == STEPS
        return outcome


@pytest.fixture(scope="module")
def job(
    running: Machines, undisturbed: Outcome, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WholeJob]:
    faults = [REWARD_DEATH, REWARD_HANG, *UPDATES, FROZEN]
    for host, ahead in zip(hosts_of(running), AHEAD, strict=True):
        running.pods.set_clock(host, ahead)
    with whole_job(running, tmp_path_factory.mktemp("disturbed"), STEPS, faults) as job:
        yield job


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """Return what was seen while the job met its faults."""
    return {}


@pytest.fixture(scope="module")
def disturbed(job: WholeJob, facts: dict[str, Any]) -> Outcome:
    """Lead the job through all faults; return its results."""
    first, second = job.machines.engines
    job.wait(1, 300)
    facts["reward"] = job.wait(3, 240)
    facts["updates"] = job.wait(7, 900)
    facts["clocks"] = [
        clock_of(job.machines.trainer, f"http://127.0.0.1:{CONTROLLER_PORT}/v1/status") - time.time(),
        *(clock_of(e.host, f"{e.url_of_agent}/healthz") - time.time() for e in (first, second)),
    ]
    old = job.machines.pods.epochs
    job.allow(9)
    job.machines.pods.change_key("second", 3.0)
    facts["key"] = job.wait(9, NETWORK)
    with first.host.flapping(6, 1.5):
        facts["flaps"] = job.wait(11, NETWORK)
    with ExitStack() as stack:
        for engine in (first, second):
            stack.enter_context(engine.host.losing(0.05))
        facts["loss"] = job.wait(13, NETWORK)
    with ExitStack() as stack:
        for engine in (first, second):
            stack.enter_context(engine.host.slow("4mbit"))
        facts["slow"] = job.wait(14, NETWORK)
    known, outages = len(job.notes("waits")), [engine.host.outages for engine in (first, second)]
    for engine in (first, second):
        engine.host.plug(out=True)
    job.allow(15)
    began = time.monotonic()
    until(lambda: len(job.notes("waits")) > known, PARKED, job.last_words)
    facts["parked"], facts["reason"] = time.monotonic() - began, job.notes("waits")[known]["reason"]
    facts["carriers"] = [engine.host.carrier for engine in (first, second)]
    facts["outages"] = [e.host.outages - before for e, before in zip((first, second), outages, strict=True)]
    for engine in (first, second):
        engine.host.plug(out=False)
    facts["goes on"] = job.wait(15, NETWORK)
    started = len(second.starts)
    facts["frozen"] = job.wait(16, 300)
    until(lambda: len(second.starts) > started, LIVENESS)
    until(lambda: second.status().get("state") == "SERVING", SERVES_AGAIN, second.last_words)
    facts["serves again"] = time.time() + AHEAD[0] - job.witness(FROZEN)["at"]
    outcome = job.finish(300)
    pods = job.machines.pods
    until(lambda: pods.epochs.settled(time.time() + min(AHEAD)), 240)
    facts["old key"] = answer_to(first, pods.headers(old.newest))
    facts["new key"] = answer_to(first, pods.headers())
    return outcome


def hosts_of(machines: Machines) -> list[Host]:
    """Return the host of the trainers and those of the engines, in the order of AHEAD."""
    return [machines.trainer, *(engine.host for engine in machines.engines)]


def clock_of(host: Host, url: str) -> float:
    """Return the time that a server writes into its answers. ``host``: of the caller."""
    return parsedate_to_datetime(host.call(httpx.get, url).headers["date"]).timestamp()


def answer_to(engine: EngineOnHost, headers: dict[str, str]) -> int:
    """Return the status of the agent's answer to a caller."""
    url = f"{engine.url_of_agent}/v1/model"
    return int(engine.host.call(httpx.get, url, headers=headers).status_code)


@pytest.mark.fault(
    row="25",
    point="a reward server gets SIGKILL, and SIGSTOP a step later, with a request that it does not answer",
    witness="files written right before; the reasons for which the trainers wait name it",
    bound="noticed in 30 s; both steps end in 240 s, of which it is away for 30 s",
    compared="samples, losses and weights of all steps of an undisturbed run, and its engines' weights, "
    "bitwise",
)
def test_a_reward_server_that_dies_or_hangs_with_a_request(
    job: WholeJob, disturbed: Outcome, undisturbed: Outcome, facts: dict[str, Any]
) -> None:
    for fault in (REWARD_DEATH, REWARD_HANG):
        at = job.witness(fault)["at"]
        wait = next(wait for wait in job.notes("waits") if wait["at"] > at)
        assert "spec.reward.url" in wait["reason"] and wait["at"] - at < DETECTION
    assert facts["reward"] < 240
    disturbed.same_as(undisturbed)


@pytest.mark.fault(
    row="14",
    point="SIGKILL of a rank before it sends weights to real engines, after the first wave, and in "
    "the middle of staging",
    witness="files written right before; the ends of the attempts name rank or process",
    bound="noticed in 30 s, restored in 300 s",
    compared="samples, losses and weights of all steps of an undisturbed run, and its engines' weights, "
    "bitwise",
)
def test_a_rank_dies_in_a_weight_update_of_real_engines(
    job: WholeJob, disturbed: Outcome, undisturbed: Outcome
) -> None:
    for fault in UPDATES:
        witness = job.witness(fault)
        end = next(end for end in job.notes("ends") if end["at"] >= witness["at"])
        assert f"rank {fault.rank} " in end["message"] or str(witness["pid"]) in end["message"]
        assert end["at"] - witness["at"] < DETECTION
        restored = next(note for note in job.notes("restores") if note["at"] > end["at"])
        assert restored["at"] - witness["at"] < RECOVERY
    assert len(job.notes("ends")) == len(UPDATES), "no other fault ends an attempt"
    disturbed.same_as(undisturbed)


@pytest.mark.fault(
    row="11",
    point="SIGSTOP of a real engine's scheduler that has sent the first tokens of answers; its "
    "server answers",
    witness="file written right before; its container is started again",
    bound="the step ends in 220 s (hangSeconds 60, timeoutSeconds 20); the engine serves again "
    "within its liveness limit and 360 s",
    compared="samples, losses and weights of all steps of an undisturbed run, and its engines' weights, "
    "bitwise",
)
def test_an_engine_hangs_while_it_generates(
    job: WholeJob, disturbed: Outcome, undisturbed: Outcome, facts: dict[str, Any]
) -> None:
    assert facts["frozen"] < HANG_SECONDS + 5 * DEADLINE + 60, "its samples did not go on elsewhere"
    assert facts["serves again"] < HANG_SECONDS + LIVENESS + SERVES_AGAIN
    disturbed.same_as(undisturbed)


@pytest.mark.fault(
    row="8",
    point="the interface of an engine flaps six times; those of both lose 5 % of all packets, are "
    "limited to 4 Mbit/s, and are down",
    witness="lost carriers, dropped and delayed packets are counted; no carrier while the trainers wait, and "
    "their reason: no engine serves",
    bound="two steps in 240 s each time; the trainers wait within 300 s and go on in 240 s",
    compared="samples, losses and weights of all steps of an undisturbed run, and its engines' weights, "
    "bitwise",
)
def test_interfaces_that_flap_lose_packets_or_are_slow(
    disturbed: Outcome, undisturbed: Outcome, facts: dict[str, Any]
) -> None:
    assert max(facts[name] for name in ("flaps", "loss", "slow", "goes on")) < NETWORK
    assert_unplugged(facts)
    disturbed.same_as(undisturbed)


@pytest.mark.fault(
    row="27",
    point="the interfaces of all engines are down until the trainers wait",
    witness="the reason for which the trainers wait: no engine serves; no interface has a carrier then",
    bound="they wait within 300 s and go on in 240 s",
    compared="samples, losses and weights of all steps of an undisturbed run, and its engines' weights, "
    "bitwise",
)
def test_no_engine_can_be_reached(
    job: WholeJob, disturbed: Outcome, undisturbed: Outcome, facts: dict[str, Any]
) -> None:
    assert facts["goes on"] < NETWORK
    assert_unplugged(facts)
    disturbed.same_as(undisturbed)
    print(facts)


def assert_unplugged(facts: dict[str, Any]) -> None:
    """Assert that the trainers waited in time for engines, whose interfaces were down from then on."""
    assert facts["parked"] < PARKED and re.search(NO_ENGINE, facts["reason"]), facts["reason"]
    assert facts["carriers"] == [False, False] and facts["outages"] == [1, 1]


@pytest.mark.fault(
    row="28",
    point="Python's clock is 30 s ahead on the host of controller and trainers, 30 s behind on one engine's "
    "and right on the other's, for a whole job",
    witness="dates in the answers of controller and agents; a rank's time beside that of the file it wrote",
    bound="no attempt ends for it; each two steps in 240 s",
    compared="samples, losses and weights of all steps of an undisturbed run, and its engines' weights, "
    "bitwise",
)
def test_clocks_that_differ_by_30_s_and_more(
    job: WholeJob, disturbed: Outcome, undisturbed: Outcome, facts: dict[str, Any]
) -> None:
    for seen, ahead in zip(facts["clocks"], AHEAD, strict=True):
        assert abs(seen - ahead) < CLOCK_ERROR
    for fault in UPDATES:
        written = (job.folder / "faults" / fault.witness).stat().st_mtime
        assert abs(job.witness(fault)["at"] - written - AHEAD[0]) < CLOCK_ERROR
    assert len(job.notes("ends")) == len(UPDATES)
    disturbed.same_as(undisturbed)


@pytest.mark.fault(
    row="key-rotation",
    point="the key's epoch changes during two steps; hosts see it three seconds apart, with clocks "
    "that differ by 60 s",
    witness="the old token is refused afterwards",
    bound="two steps in 240 s",
    compared="samples, losses and weights of all steps of an undisturbed run, and its engines' weights, "
    "bitwise",
)
def test_a_key_that_changes_during_updates(
    disturbed: Outcome, undisturbed: Outcome, facts: dict[str, Any]
) -> None:
    assert (facts["old key"], facts["new key"]) == (401, 200)
    assert facts["key"] < NETWORK
    disturbed.same_as(undisturbed)
