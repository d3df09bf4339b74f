"""The cache beside the API server's own list: complete at the first reconcile, without deleted objects."""

import asyncio
from typing import Any

import pytest
import yaml
from kubernetes import client, config

from grpo_devcluster.paths import KUBECONFIG
from grpo_operator.kuberay_client.kube import Kube
from grpo_operator.observe.cache import Cache
from grpo_operator.observe.relist import Relist
from support.api_server import Api

COUNT = 25


@pytest.fixture(scope="module", autouse=True)
def operator() -> None:
    """These tests look at the API server themselves."""


@pytest.fixture(scope="module")
def maps(api: Api) -> list[dict[str, Any]]:
    """ConfigMaps with the label of a job."""
    made = [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": f"m-{n}", "namespace": "default", "labels": {"rl.grpo.dev/job": "x"}},
        }
        for n in range(COUNT)
    ]
    api.ok("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(made))
    return made


@pytest.fixture
def kube(api: Api, monkeypatch: pytest.MonkeyPatch) -> Kube:
    monkeypatch.setattr("grpo_operator.kuberay_client.kube.PAGE", 10)
    return Kube(config.new_client_from_config(str(KUBECONFIG)))


def _cache(kube: Kube, maps: list[dict[str, Any]]) -> Cache:
    """Return a cache that lacks only ConfigMaps."""
    cache = Cache()
    for found in maps:
        cache.store("configmaps", {"type": "ADDED", "object": found})
    return cache


def test_names_come_in_pages_and_by_label(kube: Kube, maps: list[dict[str, Any]]) -> None:
    names = asyncio.run(kube.names("api/v1", "configmaps", "", "rl.grpo.dev/job"))
    assert len(names) == COUNT and ("default", "m-24") in names
    assert asyncio.run(kube.names("api/v1", "configmaps", "kube-system", "rl.grpo.dev/job")) == set()
    assert asyncio.run(kube.names("apis/none.example/v1", "nothings", "", "")) == set()


def test_the_first_reconcile_waits_for_the_last_object(kube: Kube, maps: list[dict[str, Any]]) -> None:
    async def scenario() -> None:
        cache = _cache(kube, maps[:-1])
        waiting = asyncio.create_task(Relist(kube, cache).wait_complete())
        await asyncio.sleep(2)
        assert not waiting.done()
        cache.store("configmaps", {"type": "ADDED", "object": maps[-1]})
        await asyncio.wait_for(waiting, 5)

    asyncio.run(scenario())


def test_objects_deleted_between_watches_are_dropped(
    api: Api, kube: Kube, maps: list[dict[str, Any]]
) -> None:
    cache = _cache(kube, maps)
    api.ok("delete", "configmap", "m-7")
    asyncio.run(Relist(kube, cache).forget_deleted())
    assert len(cache.keys("configmaps")) == COUNT - 1 and ("default", "m-7") not in cache.keys("configmaps")
    api.ok("delete", "configmap", "-l", "rl.grpo.dev/job=x")


def test_a_refusal_quotes_the_api_server(kube: Kube, api: Api) -> None:
    body = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "Bad_Name", "namespace": "default"}}
    with pytest.raises(client.ApiException) as refused:
        asyncio.run(kube.apply("api/v1", "configmaps", body))
    assert refused.value.status == 422 and "Bad_Name" in refused.value.reason
    assert "{" not in refused.value.reason.split("Invalid value")[0], "raw JSON"
