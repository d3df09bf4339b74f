"""Nodes without power that stay in the API, under a job of 256 training and 256 rollout GPUs.

A real API server, controller manager, scheduler and KubeRay; KWOK runs the pods.
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import yaml

from grpo_devcluster.fakenodes import gpu_cluster, volume
from grpo_devcluster.paths import REPO
from grpo_devcluster.results import record_from_test
from support.api_server import POOL, Api, until
from support.power import power_off, power_on

REPLICA = "ray.io/worker-group-replica-name"
EVICTION_SECONDS = 20
BOUND = EVICTION_SECONDS + 60
SECONDS: list[float] = []  # from each loss, when nodes are NotReady, until the job is whole
WHOLE = (32, 32)
MANIFEST = REPO / "manifests" / "deepseek-v3-512xh100.yaml"
_Pod = dict[str, Any]


@pytest.fixture(scope="module")
def job(api: Api) -> Iterator[str]:
    """Return the name of a running job on 72 nodes of 8 GPUs, of which 8 are spare."""
    objects = [*gpu_cluster(leaves=9), *volume("grpo-checkpoints")]
    api.ok("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))
    manifest = yaml.safe_load(MANIFEST.read_text())
    manifest["spec"]["scheduling"]["evictionSeconds"] = EVICTION_SECONDS
    api.ok("apply", "-f", "-", stdin=yaml.safe_dump(manifest))
    until("all pods run", lambda: _count(api) == WHOLE, 180)
    yield manifest["metadata"]["name"]
    if len(SECONDS) == 3:
        figures = {"node_power_off_seconds": max(SECONDS), "node_power_off_limit_seconds": float(BOUND)}
        record_from_test("reliability", {key: round(value, 1) for key, value in figures.items()})
    api.run("delete", "grpojobs", "--all", "--wait", "--timeout=60s")
    until("no pod is left", lambda: not api.get("pods")["items"], 120)
    api.ok("delete", "-f", "-", "--ignore-not-found", stdin=yaml.safe_dump_all(objects))


@pytest.fixture
def lost(api: Api, job: str) -> Iterator[list[str]]:
    """Give a list of nodes that get their power back after the test."""
    nodes: list[str] = []
    yield nodes
    power_on(api, *nodes)
    until("all pods run", lambda: _count(api) == WHOLE, 60)


def _pods(api: Api, pool: str) -> list[_Pod]:
    """Return the running pods of a pool."""
    pods = api.get("pods", "-l", f"{POOL}={pool}")["items"]
    return [
        p for p in pods if p["status"]["phase"] == "Running" and not p["metadata"].get("deletionTimestamp")
    ]


def _count(api: Api) -> tuple[int, int]:
    return len(_pods(api, "trainer")), len(_pods(api, "rollout"))


def _gpu_pods(api: Api) -> list[_Pod]:
    return [*_pods(api, "trainer"), *_pods(api, "rollout")]


def _uids(pods: list[_Pod], without: Collection[str] = ()) -> set[str]:
    return {p["metadata"]["uid"] for p in pods if p["spec"]["nodeName"] not in without}


def _engines(api: Api) -> dict[str, list[_Pod]]:
    engines: dict[str, list[_Pod]] = defaultdict(list)
    for pod in _pods(api, "rollout"):
        engines[pod["metadata"]["labels"][REPLICA]].append(pod)
    return engines


def _degraded(api: Api, job: str) -> tuple[str, str]:
    conditions = api.get("grpojob", job)["status"]["conditions"]
    (degraded,) = [c for c in conditions if c["type"] == "Degraded"]
    return degraded.get("reason", ""), degraded.get("message", "")


def _whole_without(api: Api, nodes: list[str]) -> bool:
    pods = _gpu_pods(api)
    return len(pods) == sum(WHOLE) and not {p["spec"]["nodeName"] for p in pods} & set(nodes)


def _lose(api: Api, job: str, lost: list[str], *nodes: str) -> None:
    """Take the power of nodes, and wait until the job is whole on others.

    The time starts when the nodes are NotReady: ``power_off`` does not wait until Kubernetes notices that
    their kubelets are silent, which depends on its own settings.
    """
    lost += nodes
    power_off(api, *nodes)
    started = time.monotonic()
    until("the status names the node", lambda: nodes[0] in _degraded(api, job)[1], 20)
    assert _degraded(api, job)[0] == "NodeNotReady"
    until("the job is whole on other nodes", lambda: _whole_without(api, lost), BOUND)
    SECONDS.append(time.monotonic() - started)


@pytest.mark.slow  # waits for three quarters of a minute
def test_a_node_that_flaps_is_not_chased(api: Api, job: str, lost: list[str]) -> None:
    before = _uids(_gpu_pods(api))
    nodes = [_pods(api, pool)[0]["spec"]["nodeName"] for pool in ("trainer", "rollout")]
    for _ in range(4):
        power_off(api, *nodes)
        time.sleep(EVICTION_SECONDS / 2)
        assert _degraded(api, job)[0] == "NodeNotReady"
        power_on(api, *nodes)
        time.sleep(2)
    assert _uids(_gpu_pods(api)) == before


@pytest.mark.fault(
    row="5",
    point="the kubelet of a node of 64 goes silent; its objects stay",
    witness="condition NodeNotReady, event NodeLost",
    bound="80 s after the node is NotReady, without the time in which Kubernetes notices the silence",
    partial="simulated nodes: no training, nothing compared",
)
def test_training_pods_of_a_node_without_power_come_back_elsewhere(
    api: Api, job: str, lost: list[str]
) -> None:
    node = _pods(api, "trainer")[0]["spec"]["nodeName"]
    others = _uids(_gpu_pods(api), {node})
    _lose(api, job, lost, node)
    assert others <= _uids(_gpu_pods(api)), "other pods were replaced"
    events = api.get("events", "--field-selector=reason=NodeLost")["items"]
    assert any(node in event["message"] for event in events)


@pytest.mark.fault(
    row="12",
    point="the kubelet of a node of an engine of several pods goes silent",
    witness="condition NodeNotReady",
    bound="80 s after the node is NotReady, without the time in which Kubernetes notices the silence",
    compared="the other engines' pods are the same",
    partial="simulated nodes: nothing generates",
)
@pytest.mark.slow
def test_an_engine_of_several_pods_moves_to_a_leaf_with_room(api: Api, job: str, lost: list[str]) -> None:
    engines = _engines(api)
    broken = next(iter(engines.values()))
    node = broken[1]["spec"]["nodeName"]
    others = _uids(_gpu_pods(api)) - _uids(broken)
    _lose(api, job, lost, node)
    assert others <= _uids(_gpu_pods(api)), "other engines were replaced"
    for pods in _engines(api).values():
        assert len({pod["spec"]["nodeName"].split("-")[1] for pod in pods}) == 1, "an engine spans leaves"


@pytest.mark.fault(
    row="6",
    point="the kubelets of seven training nodes go silent",
    witness="condition NodeNotReady",
    bound="80 s after the nodes are NotReady, without the time in which Kubernetes notices the silence",
    partial="simulated nodes: no state to restore",
)
@pytest.mark.slow  # the same as for one node, seven times
def test_a_tenth_of_the_nodes_at_once(api: Api, job: str, lost: list[str]) -> None:
    trainers = sorted({p["spec"]["nodeName"] for p in _pods(api, "trainer")})[:7]
    others = _uids(_gpu_pods(api), set(trainers))
    _lose(api, job, lost, *trainers)
    assert others <= _uids(_gpu_pods(api)), "other pods were replaced"
