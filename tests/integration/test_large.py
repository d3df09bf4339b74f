"""512 H100s: real API server, scheduler and KubeRay; KWOK runs the pods of 64 nodes of 8 GPUs."""

import copy
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import yaml

from grpo_devcluster.fakenodes import gpu_cluster, volume
from grpo_devcluster.paths import REPO
from support.api_server import POOL, Api, until

REPLICA = "ray.io/worker-group-replica-name"


@pytest.fixture(scope="module")
def gpus(api: Api) -> Iterator[None]:
    """64 GPU nodes in 8 leaves, 2 CPU nodes, and the volume of the checkpoints."""
    objects = [*gpu_cluster(), *volume("grpo-checkpoints")]
    api.ok("apply", "-f", "-", stdin=yaml.safe_dump_all(objects))
    yield
    api.ok("delete", "-f", "-", "--ignore-not-found", stdin=yaml.safe_dump_all(objects))


@pytest.fixture
def large(api: Api, gpus: None) -> Iterator[dict[str, Any]]:
    """The manifest for a test to change and apply; its job is deleted after the test."""
    yield yaml.safe_load((REPO / "manifests" / "deepseek-v3-512xh100.yaml").read_text())
    api.run("delete", "grpojobs", "--all", "--wait", "--timeout=60s")
    until("no pod is left", lambda: not api.get("pods")["items"], 120)


def _status(api: Api, name: str) -> dict[str, Any]:
    return dict(api.get("grpojob", name).get("status") or {})


def _running(api: Api, job: str) -> dict[str, list[dict[str, Any]]]:
    """Return the running pods of a job by pool."""
    pools: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for pod in api.get("pods", "-l", f"rl.grpo.dev/job={job}")["items"]:
        if pod["status"].get("phase") == "Running" and not pod["metadata"].get("deletionTimestamp"):
            pools[pod["metadata"]["labels"][POOL]].append(pod)
    return pools


def _count(api: Api, job: str) -> tuple[int, int]:
    pools = _running(api, job)
    return len(pools["trainer"]), len(pools["rollout"])


def _has_pods(api: Api, job: str, trainers: int, engines: int) -> bool:
    return _count(api, job) == (trainers, engines)


def _wait_whole(api: Api, job: str, wanted: tuple[int, int]) -> None:
    """Wait for (training pods, engine pods); a failure quotes the scheduler."""
    try:
        until("all pods run", lambda: _count(api, job) == wanted, 180)
    except AssertionError as error:
        pending = [p for p in api.get("pods")["items"] if p["status"].get("phase") == "Pending"]
        names = [p["metadata"]["name"] for p in pending]
        messages = [c.get("message") for p in pending[:3] for c in p["status"].get("conditions", [])]
        status = _status(api, job).get("conditions", [{}])[0]
        raise AssertionError(f"{_count(api, job)}: {status}; pending {names}: {messages}") from error


def _wait_reported(api: Api, job: str, ranks: str) -> None:
    """Wait until the status counts these ranks; a failure shows both counts."""
    try:
        until("status", lambda: _status(api, job).get("trainReady") == ranks)
    except AssertionError as error:
        unready = [
            (pod["metadata"]["name"], pod["status"])
            for pod in _running(api, job)["trainer"]
            if not any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"]["conditions"])
        ]
        raise AssertionError(f"{_status(api, job)}; not ready: {unready}") from error


def _where(pods: list[dict[str, Any]]) -> list[str]:
    return [pod["spec"]["nodeName"] for pod in pods]


def _engines(pods: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return the nodes of each engine."""
    engines: dict[str, list[str]] = defaultdict(list)
    for pod in pods:
        engines[pod["metadata"]["labels"][REPLICA]].append(pod["spec"]["nodeName"])
    return engines


SPLITS = [(32, 8), (48, 4), (56, 2)]


@pytest.mark.parametrize(("trainers", "engines"), SPLITS, ids=["256-256", "384-128", "448-64"])
def test_the_gpus_are_split_and_engines_stay_in_one_leaf(
    api: Api, large: dict[str, Any], trainers: int, engines: int
) -> None:
    spec, name = large["spec"], large["metadata"]["name"]
    spec["trainer"]["nodes"] = trainers
    spec["rollout"]["template"] |= {"replicas": engines, "minAvailable": 1}
    if trainers != 32:
        spec["trainer"]["parallelism"] = {"auto": True}
    assert api.apply(large).returncode == 0
    _wait_whole(api, name, (trainers, 4 * engines))
    pools = _running(api, name)
    training, rollout = _where(pools["trainer"]), _where(pools["rollout"])
    assert not set(training) & set(rollout) and len(set(training + rollout)) == trainers + 4 * engines
    for nodes in _engines(pools["rollout"]).values():
        assert len(set(nodes)) == 4 and len({node.split("-")[1] for node in nodes}) == 1
    until("the controller runs", lambda: _running(api, name)["controller"], 30)
    pools = _running(api, name)
    assert all(n.startswith("cpu-") for n in _where(pools["controller"] + pools["head"]))
    _wait_reported(api, name, f"{trainers * 8}/{trainers * 8}")
    status = _status(api, name)
    assert status["rolloutReady"] == f"{engines}/{engines}"
    assert sum(status["layout"]["stages"]) == 61 and max(status["layout"]["bytesPerGpu"]) < 80e9


@pytest.mark.slow
def test_the_rollout_pool_scales_by_whole_engines_while_training_stays(
    api: Api, large: dict[str, Any]
) -> None:
    name = large["metadata"]["name"]
    assert api.apply(large).returncode == 0
    _wait_whole(api, name, (32, 32))
    trainers = {pod["metadata"]["uid"] for pod in _running(api, name)["trainer"]}
    for engines in (6, 8):
        api.ok("scale", "rpool", f"{name}-rollout", f"--replicas={engines}")
        until(f"{engines} engines", partial(_has_pods, api, name, 32, 4 * engines), 120)
        sizes = [len(nodes) for nodes in _engines(_running(api, name)["rollout"]).values()]
        assert sizes == [4] * engines
    assert {pod["metadata"]["uid"] for pod in _running(api, name)["trainer"]} == trainers


@pytest.mark.slow  # in test_lost_nodes.py, nodes are lost whose objects stay
def test_pods_of_a_lost_node_come_back_elsewhere(api: Api, large: dict[str, Any]) -> None:
    name = large["metadata"]["name"]
    large["spec"]["rollout"]["template"] |= {"replicas": 7}
    assert api.apply(large).returncode == 0
    _wait_whole(api, name, (32, 28))
    victim = _running(api, name)["trainer"][0]
    node = victim["spec"]["nodeName"]
    others = {p["metadata"]["uid"] for p in _running(api, name)["trainer"]} - {victim["metadata"]["uid"]}
    gone = api.get("node", node)
    api.ok("delete", "node", node)
    try:
        until("the gang is whole", lambda: _elsewhere(api, name, node), 180)
        assert others <= {p["metadata"]["uid"] for p in _running(api, name)["trainer"]}
    finally:
        for key in ("resourceVersion", "uid", "creationTimestamp"):
            gone["metadata"].pop(key)
        gone["spec"].pop("taints", None)
        api.apply(gone)


def _elsewhere(api: Api, job: str, node: str) -> bool:
    trainers = _where(_running(api, job)["trainer"])
    return len(trainers) == 32 and node not in trainers


@pytest.mark.slow
def test_the_second_large_job_waits_until_the_first_is_gone(api: Api, large: dict[str, Any]) -> None:
    first, second = large["metadata"]["name"], "second"
    other = copy.deepcopy(large) | {"metadata": {"name": second}}
    assert api.ok("apply", "-f", "-", stdin=yaml.safe_dump_all([large, other]))
    names = (first, second)
    until("one runs", lambda: [n for n in names if _count(api, n) == (32, 32)], 180)
    (runs,) = [n for n in names if _count(api, n) == (32, 32)]
    (waits,) = set(names) - {runs}
    status = _status(api, waits)
    assert status["phase"] == "Waiting" and status["conditions"][0]["reason"] == "WaitingForCapacity"
    assert api.get("pods", "-l", f"rl.grpo.dev/job={waits}")["items"] == [], "a waiting job holds pods"
    api.ok("delete", "grpojob", runs)
    until("the other starts", lambda: _count(api, waits) == (32, 32), 240)
