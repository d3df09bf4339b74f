"""The operator behind an API server that fails: no duplicate, no lost change, no crash."""

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from grpo_devcluster.operator_process import operator_process
from support.api_proxy import ApiProxy
from support.api_server import WHOLE, Api, running, until

AWAY_SECONDS = 120


@pytest.fixture(scope="module", autouse=True)
def operator(proxy: ApiProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """This module's operator sees the API server through the proxy."""
    with operator_process(tmp_path_factory.mktemp("operator"), proxy.kubeconfig) as process:
        yield process
        assert process.poll() is None, "the operator died"


@pytest.fixture(autouse=True)
def healthy(proxy: ApiProxy) -> Iterator[None]:
    yield
    proxy.down = proxy.repeat_events = False
    proxy.write_codes.clear()


def _clusters(api: Api) -> list[str]:
    return [c["metadata"]["uid"] for c in api.get("rayclusters")["items"]]


def _has_engines(api: Api, count: int) -> bool:
    return running(api)["rollout"] == count


@pytest.mark.fault(
    row="20",
    point="writes answer 409, 422, 429, 500 and 503",
    witness="five failed writes counted",
    bound="120 s",
    compared="the pods of an undisturbed job, by number",
    partial="409 to 503 only",
)
def test_failed_writes_are_repeated(api: Api, proxy: ApiProxy, tiny: dict[str, Any], fake_nodes: Any) -> None:
    proxy.write_codes.extend([409, 422, 429, 500, 503])
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 120)
    assert proxy.failed == 5 and len(_clusters(api)) == 1


@pytest.mark.fault(
    row="20",
    point="watches are cut more than twenty times during changes",
    witness="cuts counted",
    bound="90 s for each change",
    compared="the pods of an undisturbed job, by number",
    partial="cut watches only",
)
def test_cut_watches_lose_nothing(api: Api, proxy: ApiProxy, tiny: dict[str, Any], fake_nodes: Any) -> None:
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0
    for replicas in (3, 1, 2):
        for _ in range(6):
            proxy.cut_watches()
            time.sleep(0.4)
        until("the pool", lambda: api.exists("rpool", "tiny-moe-rollout"), 60)
        api.ok("scale", "rpool", "tiny-moe-rollout", f"--replicas={replicas}")
        until(f"{replicas} engines", partial(_has_engines, api, replicas), 90)
    assert proxy.cut > 20 and running(api) == WHOLE


@pytest.mark.fault(
    row="20",
    point="watches repeat old events",
    witness="repeated events counted",
    bound="120 s",
    compared="pods and cluster stay the same, by UID; none is doubled",
)
def test_stale_and_repeated_events_change_nothing(
    api: Api, proxy: ApiProxy, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    proxy.repeat_events = True
    proxy.cut_watches()
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 120)
    uids = {p["metadata"]["uid"] for p in api.get("pods")["items"]}
    time.sleep(5)
    assert proxy.repeated > 20
    assert {p["metadata"]["uid"] for p in api.get("pods")["items"]} == uids and len(_clusters(api)) == 1


@pytest.mark.fault(
    row="19",
    point="no request reaches the API server for 120 s",
    witness="refused connections counted",
    bound="the change that was made meanwhile is done in 120 s",
    compared="the pods are the same, by UID",
)
@pytest.mark.slow  # two minutes; test_leader.py cuts an operator off for a shorter time
def test_two_minutes_without_the_api_server(
    api: Api, proxy: ApiProxy, tiny: dict[str, Any], fake_nodes: Any
) -> None:
    fake_nodes(2)
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 120)
    before = {p["metadata"]["uid"] for p in api.get("pods")["items"]}
    proxy.down = True
    proxy.cut_watches()
    time.sleep(AWAY_SECONDS / 2)
    api.ok("scale", "rpool", "tiny-moe-rollout", "--replicas=3")  # what happens meanwhile is not lost
    time.sleep(AWAY_SECONDS / 2)
    assert proxy.refused > 0
    assert {p["metadata"]["uid"] for p in api.get("pods")["items"]} == before
    proxy.down = False
    until("the third engine", lambda: running(api)["rollout"] == 3, 120)
    assert before < {p["metadata"]["uid"] for p in api.get("pods")["items"]}
