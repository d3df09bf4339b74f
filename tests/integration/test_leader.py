"""Two replicas of the operator: one writes, and the other takes over when it is lost.

Both have the operator's account, each with a token of its own, so that the audit log of the API server shows
who has written what.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_devcluster.controlplane import AUDITED_WHOLE, audit_log
from grpo_devcluster.operator_process import operator_process
from grpo_devcluster.results import record_from_test
from support.api_proxy import ApiProxy
from support.api_server import Api, until
from support.operator_account import account, token, token_id, user, write_kubeconfig
from support.replica_writes import Write, duplicates, taken_over, writes_of

LEASE = "grpo-operator-all"
LIMIT = 20.0  # seconds
MIDDLE = 4  # of the six writes or more for a job: the last one of the first leader
QUIET = 3.0  # seconds without a write, after which a job is settled


@pytest.fixture(scope="module", autouse=True)
def operator(api: Api) -> Iterator[None]:
    """The tests start operators of their own, with this account."""
    with account(api, AUDITED_WHOLE):
        yield


@pytest.fixture
def tokens(api: Api, operator: None) -> list[str]:
    """One for each replica."""
    return [token(api, AUDITED_WHOLE) for _ in range(2)]


@pytest.fixture
def proxy(tokens: list[str], tmp_path: Path) -> Iterator[ApiProxy]:
    """Yield the proxy between the first replica and the API server."""
    made = ApiProxy(write_kubeconfig(tmp_path / "first.kubeconfig", tokens[0]), tmp_path)
    yield made
    made.stop()


@dataclass(frozen=True)
class Replicas:
    """Two operators. ``ids``: of their tokens."""

    processes: list[subprocess.Popen[bytes]]
    ids: list[str]

    def writes(self, number: int, job: str = "") -> list[Write]:
        """Return what one of them has written, for one job if it is named."""
        found = writes_of(audit_log(), user(AUDITED_WHOLE))
        return [w for w in found if w.by == self.ids[number] and job in w.about + w.content]

    def duplicates(self) -> list[str]:
        """Return what both have written."""
        return duplicates([*self.writes(0), *self.writes(1)])


@pytest.fixture
def replicas(api: Api, proxy: ApiProxy, tokens: list[str], tmp_path: Path) -> Iterator[Replicas]:
    """The first replica, which leads, and the second, which does not go through the proxy."""
    api.run("delete", "lease", LEASE, "-n", AUDITED_WHOLE)
    direct = write_kubeconfig(tmp_path / "second.kubeconfig", tokens[1])
    with ExitStack() as stack:
        made = []
        for number, kubeconfig in enumerate((proxy.kubeconfig, direct)):
            folder = tmp_path / str(number)
            folder.mkdir()
            ports = {"GRPO_METRICS_PORT": f"{19100 + number}", "GRPO_HEALTH_PORT": f"{19200 + number}"}
            env, changes = ports | {"POD_NAME": f"operator-{number}"}, {"namespace": AUDITED_WHOLE}
            made.append(stack.enter_context(operator_process(folder, kubeconfig, changes=changes, env=env)))
            until("it is ready", partial(_ready, number), 60)
        assert _holder(api) == "operator-0"
        yield Replicas(made, [token_id(own) for own in tokens])


def _ready(number: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{19200 + number}/readyz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _jobs_counted(number: int) -> int:
    text = httpx.get(f"http://127.0.0.1:{19100 + number}/metrics", timeout=5).text
    return sum(line.startswith("grpo_job_info{") for line in text.splitlines())


def _holder(api: Api) -> str:
    return str(api.get("lease", LEASE, "-n", AUDITED_WHOLE)["spec"]["holderIdentity"])


def _create(api: Api, tiny: dict[str, Any], name: str) -> None:
    """Create a job with all children but no pods."""
    job = tiny | {"metadata": {"name": name}, "spec": tiny["spec"] | {"suspend": True}}
    assert api.apply(job).returncode == 0


def _suspended(api: Api, name: str) -> bool:
    return bool(api.get("grpojob", name).get("status", {}).get("phase") == "Suspended")


def _settle(api: Api, proxy: ApiProxy, tiny: dict[str, Any], name: str) -> None:
    """Create a job and wait until the first replica has nothing more to write for it."""
    _create(api, tiny, name)
    until("Suspended", lambda: _suspended(api, name), 60)
    seen, since = proxy.writes, time.monotonic()

    def quiet() -> bool:
        nonlocal seen, since
        if proxy.writes != seen:
            seen, since = proxy.writes, time.monotonic()
        return time.monotonic() - since > QUIET

    until("no more writes", quiet, 60)


def _lose_in_the_middle(
    api: Api, proxy: ApiProxy, tiny: dict[str, Any], name: str, lose: Callable[[], None]
) -> None:
    """Create a job, and lose the leader while the API server gets one of the writes for it."""
    lost: list[int] = []

    def before(write: int) -> None:
        if write == MIDDLE:
            lose()
            lost.append(write)

    proxy.writes, proxy.before_write = 0, before
    try:
        _create(api, tiny, name)
        until("the leader is lost", lambda: lost, 60)
    finally:
        proxy.before_write = None


@pytest.mark.fault(
    row="19",
    point="SIGKILL of the leader of two replicas, in the middle of a job's creation",
    witness="the process has ended; the other one leads; the audit log has writes of both for the job",
    bound="the limit of the lease",
    compared="writes of both in the audit log: nothing twice, nothing for a job that the first had finished",
)
def test_the_other_replica_takes_over_from_a_killed_leader(
    api: Api, proxy: ApiProxy, tiny: dict[str, Any], fake_nodes: Any, replicas: Replicas
) -> None:
    fake_nodes(2)
    _settle(api, proxy, tiny, "untouched")
    assert (_jobs_counted(0), _jobs_counted(1)) == (1, 0), "each job is counted once"
    leader = replicas.processes[0]
    _lose_in_the_middle(api, proxy, tiny, "interrupted", lambda: os.kill(leader.pid, signal.SIGKILL))
    leader.wait(5)
    _create(api, tiny, "later")
    started = time.monotonic()
    until("the next leader's work", lambda: _suspended(api, "later"), LIMIT + 10)
    seconds = time.monotonic() - started
    assert seconds <= LIMIT and _holder(api) == "operator-1"
    record_from_test("reliability", {"leader_failover_seconds": round(seconds, 1)})
    until("the rest of its work", lambda: _suspended(api, "interrupted"), 30)
    assert replicas.writes(0, "interrupted") and replicas.writes(1, "interrupted")
    assert replicas.duplicates() == []
    assert replicas.writes(0, "untouched")
    # It may not read the Secret of a key, so it asks for it again, and is refused.
    assert not [write for write in replicas.writes(1, "untouched") if write.done]


def test_a_leader_that_is_asked_to_end_hands_over_at_once(
    api: Api, proxy: ApiProxy, tiny: dict[str, Any], fake_nodes: Any, replicas: Replicas
) -> None:
    fake_nodes(2)
    _lose_in_the_middle(api, proxy, tiny, "interrupted", replicas.processes[0].terminate)
    started = time.monotonic()
    until("the other one leads", lambda: _holder(api) == "operator-1", 15)
    assert time.monotonic() - started < 10
    until("Suspended", lambda: _suspended(api, "interrupted"), 30)
    assert replicas.duplicates() == []


@pytest.mark.fault(
    row="19",
    point="no request of the leader reaches the API server, from the middle of a job's creation on",
    witness="the other one leads; the audit log has writes of both for the job",
    bound="30 s",
    compared="writes of both in the audit log: nothing twice, and nothing of the first after the lease moved",
    partial="a held connection, not a dead server",
)
@pytest.mark.slow
def test_a_leader_that_is_cut_off_writes_nothing_more(
    api: Api, proxy: ApiProxy, tiny: dict[str, Any], fake_nodes: Any, replicas: Replicas
) -> None:
    fake_nodes(2)
    try:
        _lose_in_the_middle(api, proxy, tiny, "interrupted", lambda: setattr(proxy, "down", True))
        until("the other one leads", lambda: _holder(api) == "operator-1", 30)
    finally:
        proxy.down = False
    seen = len(proxy.paths)
    until("the first one reads the lease", lambda: any(LEASE in p for p in proxy.paths[seen:]), 30)
    _create(api, tiny, "later")
    for job in ("interrupted", "later"):
        until("Suspended", partial(_suspended, api, job), 30)
    time.sleep(6)  # two more looks of the first one at the lease
    assert _holder(api) == "operator-1"
    assert replicas.writes(0, "interrupted") and replicas.writes(1, "interrupted")
    moved = taken_over(replicas.writes(1), replicas.ids[1])
    assert not [write for write in replicas.writes(0) if write.at > moved]
    assert replicas.duplicates() == []
