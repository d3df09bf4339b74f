"""The hosts of an engine start their servers together, and lose them together."""

import pytest

from grpo_operator.api.v1alpha1.status import HostState
from grpo_worker.weightsync.agent.host_rendezvous import LOST_SECONDS, HostRendezvous, HostReport


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Host:
    """A host as its container behaves: it obeys the answers."""

    def __init__(self, index: int) -> None:
        self.index, self.process, self.round, self.ended, self.error = index, f"p{index}", "", "", ""

    def report(self, to: HostRendezvous) -> str:
        """Report, then start or kill the server as the answer says; return the round that runs now."""
        mine = HostReport(self.index, f"pod-{self.index}", self.process, self.round, self.ended, self.error)
        answer = to.report(mine)
        self.round = answer if answer and not self.round else ("" if answer != self.round else self.round)
        return self.round

    def restart(self) -> None:
        self.process, self.round = self.process + "'", ""

    def crash(self, error: str) -> None:
        self.ended, self.error, self.round = self.round, error, ""


def started(clock: Clock, count: int = 3) -> tuple[HostRendezvous, list[Host]]:
    engine, hosts = HostRendezvous(count, clock), [Host(i) for i in range(count)]
    run(engine, hosts)
    assert engine.problem() == ""
    return engine, hosts


def run(engine: HostRendezvous, hosts: list[Host], clock: Clock | None = None, seconds: int = 5) -> None:
    for _ in range(seconds):
        for host in hosts:
            host.report(engine)
        if clock:
            clock.now += 1


def test_no_server_starts_before_all_hosts_are_there() -> None:
    engine, (first, second) = HostRendezvous(2, Clock()), (Host(0), Host(1))
    assert first.report(engine) == first.report(engine) == ""
    assert engine.problem() == "waiting for host 1 of 2"
    assert second.report(engine)
    assert engine.problem() == "pod-0, pod-1: the server starts"
    assert first.report(engine) == second.report(engine) != ""
    run(engine, [first, second])
    assert engine.problem() == "" and {h.state for h in engine.states()} == {HostState.RUNNING}


@pytest.mark.parametrize("lost", [0, 2])
def test_a_restarted_container_ends_the_round_of_all(lost: int) -> None:
    clock = Clock()
    engine, hosts = started(clock)
    before = hosts[0].round
    hosts[lost].restart()
    assert hosts[lost].report(engine) == "", "it may not join the servers of the old round"
    assert f"pod-{lost}: the engine's container restarted" in engine.problem()
    others = [host for host in hosts if host.index != lost]
    assert next(host.report(engine) for host in others) == ""
    run(engine, hosts)
    (after,) = {host.round for host in hosts}
    assert after and after != before and engine.problem() == ""


def test_a_server_that_ends_names_its_pod_and_error_once() -> None:
    clock = Clock()
    engine, hosts = started(clock)
    hosts[1].crash("CUDA out of memory")
    hosts[1].report(engine)
    assert engine.problem().startswith("pod-1: the server ended: CUDA out of memory")
    run(engine, hosts)
    assert engine.problem() == "" and hosts[1].round, "the old error does not end the new round"


def test_a_server_starts_only_when_all_others_have_ended() -> None:
    engine, hosts = started(Clock())
    hosts[1].restart()
    assert hosts[1].report(engine) == hosts[1].report(engine) == "", "hosts 0 and 2 run their servers still"
    hosts[0].report(engine)
    assert hosts[1].report(engine) == ""
    hosts[2].report(engine)
    hosts[2].report(engine)
    hosts[0].report(engine)
    assert hosts[1].report(engine) != ""


def test_a_silent_host_is_lost_and_takes_the_others_out_of_service() -> None:
    clock = Clock()
    engine, hosts = started(clock)
    run(engine, hosts[:2], clock, int(LOST_SECONDS) + 1)
    assert engine.problem() == (f"pod-2: no report for {LOST_SECONDS:.0f} s; waiting for host 2 of 3"), (
        "its servers would wait for it for half an hour"
    )
    assert [h.state for h in engine.states()] == [HostState.WAITING, HostState.WAITING, HostState.LOST]
    assert {host.round for host in hosts[:2]} == {""}
    run(engine, hosts)  # a partition that heals: its old server is of no use
    run(engine, hosts)
    assert engine.problem() == "" and len({host.round for host in hosts}) == 1


def test_a_restarted_agent_adopts_the_running_servers() -> None:
    clock = Clock()
    _, hosts = started(clock)
    before = hosts[0].round
    engine = HostRendezvous(3, clock)
    assert hosts[0].report(engine) == hosts[1].report(engine) == before, "nothing is known of host 2 yet"
    assert "waiting for host 2" in engine.problem()
    run(engine, hosts)
    assert engine.problem() == "" and {host.round for host in hosts} == {before}


def test_a_replaced_first_host_restarts_the_servers_of_the_others() -> None:
    clock = Clock()
    _, hosts = started(clock)
    engine = HostRendezvous(3, clock)  # the agent of the new pod
    hosts[0] = Host(0)
    run(engine, hosts)
    assert engine.problem() == "" and len({host.round for host in hosts}) == 1


def test_rounds_that_fail_again_and_again_begin_ever_later() -> None:
    clock = Clock()
    engine, hosts = started(clock)
    waits = []
    for _ in range(10):
        hosts[1].crash("it fails")
        began = clock.now
        while not hosts[1].round:
            run(engine, hosts, clock, 1)
        waits.append(clock.now - began)
        run(engine, hosts, clock, 2)
    assert waits[0] <= 4 and waits == sorted(waits) and 300 <= waits[-1] <= 305
    clock.now += 700
    run(engine, hosts, None, 1)
    assert engine.problem() != ""  # all were silent meanwhile
