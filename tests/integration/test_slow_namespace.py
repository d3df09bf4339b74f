"""The operator while the admission webhooks of one namespace hang, and while it lacks the right to a kind."""

import copy
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_devcluster.operator_process import operator_process
from grpo_operator.handlers.health import PORT
from support.api_proxy import ApiProxy
from support.api_server import WHOLE, Api, lose_controller, running, until

HANG_SECONDS, PROMPT_SECONDS = 25, 5
SLOW_JOBS, NODES = 6, 8  # more jobs than a namespace has places


@pytest.fixture(scope="module", autouse=True)
def operator(proxy: ApiProxy, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """This module's operator sees the API server through the proxy, at first without ConfigMaps."""
    proxy.forbidden.add("configmaps")
    with operator_process(tmp_path_factory.mktemp("operator"), proxy.kubeconfig) as process:
        yield process
        assert process.poll() is None, "the operator died"


@pytest.fixture
def slow(api: Api, proxy: ApiProxy) -> Iterator[str]:
    """Return a namespace in which every write takes HANG_SECONDS."""
    api.ok("create", "namespace", "slow")
    proxy.write_delays["/namespaces/slow/"] = HANG_SECONDS
    yield "slow"
    proxy.write_delays.clear()
    api.ok("delete", "grpojobs", "--all", "-n", "slow")
    api.ok("delete", "namespace", "slow", "--wait=false")


def _probe(path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, "no answer"


def test_an_operator_without_the_right_to_a_kind_is_alive_and_names_it(proxy: ApiProxy) -> None:
    until("the kind is named", lambda: "the cache waits for configmaps" in _probe("readyz")[1])
    assert _probe("readyz")[0] == 503 and _probe("healthz") == (200, "ok\n")
    proxy.forbidden.clear()
    until("ready", lambda: _probe("readyz") == (200, "ok\n"), 90)


def test_a_suspend_is_prompt_while_every_write_of_another_namespace_hangs(
    api: Api, proxy: ApiProxy, tiny: dict[str, Any], fake_nodes: Any, slow: str
) -> None:
    fake_nodes(NODES)
    assert api.apply(tiny).returncode == 0
    until("all pods run", lambda: running(api) == WHOLE, 60)
    for number in range(SLOW_JOBS):
        hanging = copy.deepcopy(tiny)
        hanging["metadata"] |= {"name": f"slow-{number}", "namespace": slow}
        assert api.apply(hanging).returncode == 0
    until("the slow namespace's places hang", lambda: proxy.delayed >= 4)
    lose_controller(api, "tiny-moe")
    tiny["spec"]["suspend"] = True
    assert api.apply(tiny).returncode == 0
    began = time.monotonic()
    until("the pods are given back", lambda: _given_back(api), PROMPT_SECONDS)
    until("Suspended", lambda: api.get("grpojob", "tiny-moe")["status"]["phase"] == "Suspended")
    assert time.monotonic() - began < HANG_SECONDS, "it waited for a write of the slow namespace"
    assert _probe("healthz")[0] == _probe("readyz")[0] == 200
    proxy.write_delays.clear()
    api.ok("uncordon", *(f"fake-{index}" for index in range(NODES)))
    until("the slow jobs start", lambda: len(_clusters(api, slow)) == SLOW_JOBS, 120)


def _given_back(api: Api) -> bool:
    return not [c for c in _clusters(api, "default") if not c["spec"].get("suspend")]


def _clusters(api: Api, namespace: str) -> list[dict[str, Any]]:
    return list(api.get("rayclusters", "-n", namespace)["items"])
