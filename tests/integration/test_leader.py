"""Two replicas of the operator: one writes, and the other takes over when it is killed."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from grpo_devcluster.operator_process import operator_process
from grpo_devcluster.paths import KUBECONFIG
from grpo_devcluster.results import record_from_test
from support.api_server import Api, until
from support.fault_proxy import FaultProxy

LEASE = "grpo-operator-all"
LIMIT = 20.0  # seconds


@pytest.fixture(scope="module", autouse=True)
def operator() -> None:
    """The tests start operators of their own."""


@pytest.fixture
def replicas(api: Api, proxy: FaultProxy, tmp_path: Path) -> Iterator[list[Any]]:
    """The first replica, which goes through the proxy, and the second, which does not."""
    api.run("delete", "lease", LEASE)
    with ExitStack() as stack:
        made = []
        for number, kubeconfig in enumerate((proxy.kubeconfig, KUBECONFIG)):
            folder = tmp_path / str(number)
            folder.mkdir()
            ports = {"GRPO_METRICS_PORT": f"{19100 + number}", "GRPO_HEALTH_PORT": f"{19200 + number}"}
            env = ports | {"POD_NAME": f"operator-{number}"}
            made.append(stack.enter_context(operator_process(folder, kubeconfig, env=env)))
            until("it is ready", partial(_ready, number), 60)
        yield made


def _ready(number: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{19200 + number}/readyz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _jobs_counted(number: int) -> int:
    text = httpx.get(f"http://127.0.0.1:{19100 + number}/metrics", timeout=5).text
    return sum(line.startswith("grpo_job_info{") for line in text.splitlines())


def _holder(api: Api) -> str:
    return str(api.get("lease", LEASE)["spec"]["holderIdentity"])


def _suspended(tiny: dict[str, Any], name: str) -> dict[str, Any]:
    return tiny | {"metadata": {"name": name}, "spec": tiny["spec"] | {"suspend": True}}


def _phase(api: Api, name: str) -> str | None:
    phase: str | None = api.get("grpojob", name).get("status", {}).get("phase")
    return phase


@pytest.mark.fault(
    row="19",
    point="SIGKILL of the leader of two replicas",
    witness="the process has ended; the other one leads",
    bound="the limit of the lease",
    partial="nothing compared",
)
def test_the_other_replica_takes_over_from_a_killed_leader(
    api: Api, proxy: FaultProxy, tiny: dict[str, Any], fake_nodes: Any, replicas: list[Any]
) -> None:
    fake_nodes(2)
    assert _holder(api) == "operator-0"
    assert api.apply(_suspended(tiny, "first")).returncode == 0
    until("Suspended", lambda: _phase(api, "first") == "Suspended", 60)
    assert (_jobs_counted(0), _jobs_counted(1)) == (1, 0), "each job is counted once"
    writes = proxy.writes
    assert writes > 0
    replicas[0].send_signal(signal.SIGKILL)
    replicas[0].wait()
    assert api.apply(_suspended(tiny, "second")).returncode == 0
    started = time.monotonic()
    until("the next leader's work", lambda: _phase(api, "second") == "Suspended", LIMIT + 10)
    seconds = time.monotonic() - started
    assert seconds <= LIMIT and _holder(api) == "operator-1"
    record_from_test("reliability", {"leader_failover_seconds": round(seconds, 1)})


def test_a_leader_that_is_asked_to_end_hands_over_at_once(
    api: Api, tiny: dict[str, Any], fake_nodes: Any, replicas: list[Any]
) -> None:
    fake_nodes(2)
    replicas[0].terminate()
    started = time.monotonic()
    until("the other one leads", lambda: _holder(api) == "operator-1", 15)
    assert time.monotonic() - started < 10
    assert api.apply(_suspended(tiny, "third")).returncode == 0
    until("Suspended", lambda: _phase(api, "third") == "Suspended", 30)


@pytest.mark.fault(
    row="19",
    point="no request of the leader reaches the API server",
    witness="the other one leads",
    bound="30 s",
    compared="number of writes before",
    partial="a held connection, not a dead server",
)
def test_a_leader_that_is_cut_off_writes_nothing_more(
    api: Api, proxy: FaultProxy, tiny: dict[str, Any], fake_nodes: Any, replicas: list[Any]
) -> None:
    fake_nodes(2)
    proxy.down = True
    try:
        until("the other one leads", lambda: _holder(api) == "operator-1", 30)
    finally:
        proxy.down = False
    time.sleep(6)  # the first one reaches the API server again
    assert _holder(api) == "operator-1"
    writes = proxy.writes
    assert api.apply(_suspended(tiny, "fourth")).returncode == 0
    until("Suspended", lambda: _phase(api, "fourth") == "Suspended", 30)
    assert proxy.writes == writes, "the one that was cut off has written"
