"""Leader election: one leader at a time, whatever clocks and answers do."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes.client import ApiException

from grpo_operator.handlers.leader import LEASE_SECONDS, RENEW_SECONDS, Leader, lease_name


class Server:
    """API server with one Lease, which answers each call after ``before`` has run."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.writes: list[str] = []
        self.before: Callable[[str], None] = lambda _: None

    async def get(self, _group: str, _plural: str, _namespace: str, _name: str) -> dict[str, Any] | None:
        self.before("get")
        return None if self.lease is None else {**self.lease, "metadata": dict(self.lease["metadata"])}

    async def create(self, _group: str, _plural: str, manifest: dict[str, Any]) -> dict[str, Any]:
        self.before("create")
        if self.lease is not None:
            raise ApiException(status=409)
        return self._store(manifest["metadata"], manifest["spec"], 1)

    async def patch(self, _group: str, _plural: str, manifest: dict[str, Any], _: str) -> dict[str, Any]:
        self.before("patch")
        assert self.lease is not None
        version = self.lease["metadata"]["resourceVersion"]
        if manifest["metadata"]["resourceVersion"] != version:
            raise ApiException(status=409)
        return self._store(manifest["metadata"], self.lease["spec"] | manifest["spec"], int(version) + 1)

    def _store(self, metadata: dict[str, Any], spec: dict[str, Any], version: int) -> dict[str, Any]:
        self.lease = {"metadata": metadata | {"resourceVersion": str(version)}, "spec": spec}
        self.writes.append(spec["holderIdentity"])
        return self.lease


class Time:
    """Virtual time: sleepers wake in order while ``pass_`` moves it."""

    def __init__(self) -> None:
        self.now = 100.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    async def sleep(self, seconds: float) -> None:
        event = asyncio.Event()
        self._sleepers.append((self.now + seconds, event))
        await event.wait()

    async def pass_(self, seconds: float) -> None:
        end = self.now + seconds
        while True:
            await _settle()
            due = min((time for time, _ in self._sleepers), default=end + 1)
            if due > end:
                break
            self.now = due
            for sleeper in [s for s in self._sleepers if s[0] <= due]:
                self._sleepers.remove(sleeper)
                sleeper[1].set()
        self.now = end


async def _settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def _replica(server: Server, time: Time, identity: str) -> Leader:
    return Leader(server, "grpo-system", "lease", identity, lambda: time.now, time.sleep)


async def test_one_of_two_replicas_leads_and_the_other_waits() -> None:
    server, time = Server(), Time()
    replicas = [_replica(server, time, name) for name in "ab"]
    tasks = [asyncio.create_task(replica.run()) for replica in replicas]
    await time.pass_(60)
    assert [replica.leads for replica in replicas] == [True, False] and set(server.writes) == {"a"}
    for task in tasks:
        task.cancel()


async def test_a_killed_leader_is_followed_within_the_limit() -> None:
    server, time = Server(), Time()
    first, second = _replica(server, time, "a"), _replica(server, time, "b")
    tasks = [asyncio.create_task(first.run()), asyncio.create_task(second.run())]
    await time.pass_(30)
    tasks[0].cancel()
    await time.pass_(LEASE_SECONDS - 3)
    assert not second.leads, "the lease may still be renewed"
    await time.pass_(8)
    assert second.leads
    tasks[1].cancel()


async def test_a_leader_that_ends_hands_over_at_once() -> None:
    server, time = Server(), Time()
    first, second = _replica(server, time, "a"), _replica(server, time, "b")
    tasks = [asyncio.create_task(first.run()), asyncio.create_task(second.run())]
    await time.pass_(5)
    tasks[0].cancel()
    await first.release()
    await time.pass_(3)
    assert second.leads
    tasks[1].cancel()


async def test_a_leader_that_cannot_renew_stops_before_another_one_takes_over() -> None:
    server, time = Server(), Time()
    first, second = _replica(server, time, "a"), _replica(server, time, "b")
    leading = asyncio.create_task(first.run())
    await time.pass_(5)
    cut, unreachable = time.now, {leading}

    def before(_: str) -> None:
        if asyncio.current_task() in unreachable:
            raise ApiException(status=503)

    server.before = before
    standby = asyncio.create_task(second.run())
    await time.pass_(RENEW_SECONDS + 2)
    assert not first.leads and not second.leads, "the first has stopped, and the second waits"
    await time.pass_(LEASE_SECONDS)
    assert second.leads and time.now - cut < 2 * LEASE_SECONDS
    unreachable.clear()
    await time.pass_(5)
    assert second.leads and not first.leads
    for task in (leading, standby):
        task.cancel()


async def test_a_single_replica_leads_again_when_the_api_server_is_back() -> None:
    server, time = Server(), Time()
    leader = _replica(server, time, "a")
    task = asyncio.create_task(leader.run())
    await time.pass_(5)

    def before(_: str) -> None:
        raise ApiException(status=503)

    server.before = before
    await time.pass_(120)
    assert not leader.leads
    server.before = lambda _: None
    await time.pass_(3)
    assert leader.leads
    task.cancel()


async def test_a_leader_whose_lease_was_taken_stops() -> None:
    server, time = Server(), Time()
    leader = _replica(server, time, "a")
    task = asyncio.create_task(leader.run())
    await time.pass_(5)
    assert server.lease is not None
    server.lease["spec"]["holderIdentity"] = "b"
    await time.pass_(3)
    assert not leader.leads
    task.cancel()


async def test_work_runs_only_while_the_replica_leads() -> None:
    server, time = Server(), Time()
    leader = _replica(server, time, "a")
    runs: list[str] = []

    async def work() -> None:
        runs.append("begin")
        try:
            await asyncio.Event().wait()
        finally:
            runs.append("end")

    working = asyncio.create_task(leader.while_leading(work))
    await time.pass_(5)
    assert runs == []
    task = asyncio.create_task(leader.run())
    await time.pass_(3)
    assert runs == ["begin"]
    assert server.lease is not None
    server.lease["spec"]["holderIdentity"] = "b"
    await time.pass_(3)
    assert runs == ["begin", "end"]
    server.lease["spec"]["holderIdentity"] = ""
    await time.pass_(3)
    assert runs == ["begin", "end", "begin"]
    working.cancel()
    await _settle()
    assert runs[-1] == "end"
    task.cancel()


async def test_an_error_of_the_work_is_raised() -> None:
    server, time = Server(), Time()
    leader = _replica(server, time, "a")
    task = asyncio.create_task(leader.run())

    async def work() -> None:
        raise ValueError("broken")

    working = asyncio.create_task(leader.while_leading(work))
    await time.pass_(3)
    with pytest.raises(ValueError, match="broken"):
        await working
    task.cancel()


async def test_a_container_that_restarts_takes_over_from_itself() -> None:
    server, time = Server(), Time()
    first = asyncio.create_task(_replica(server, time, "pod-a").run())
    await time.pass_(5)
    first.cancel()
    again = _replica(server, time, "pod-a")
    task = asyncio.create_task(again.run())
    await time.pass_(1)
    assert again.leads and server.lease is not None and server.lease["spec"]["leaseTransitions"] == 0
    task.cancel()


def test_operators_of_other_namespaces_have_another_lease() -> None:
    assert lease_name(()) == "grpo-operator-all"
    assert lease_name(("b", "a")) == lease_name(("a", "b")) != lease_name(("a",))
