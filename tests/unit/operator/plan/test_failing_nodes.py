"""Nodes on which a job's ranks fail: which of them the training pods avoid, and what users see."""

from typing import Any

from grpo_operator.api.messages import NodeFailures
from grpo_operator.api.v1alpha1.status import FailingNodeStatus
from grpo_operator.kuberay_client.models import RayClusterStatus
from grpo_operator.plan.capacity.failing_nodes import (
    avoided_names,
    failing_event,
    failing_nodes,
    forget_request,
)
from grpo_operator.plan.capacity.feasibility import PodRequest
from grpo_operator.plan.observed import Observed
from grpo_operator.render.ray_cluster import job_cluster
from grpo_operator.settings import OperatorSettings
from support.objects import controller_status, job, pool_of, spec_of

TRAINERS = PodRequest("trainer", "spec.trainer.nodes", 2, 1.0, 2**30, gpus=8)
ENGINES = PodRequest("rollout", "spec.rollout", 1, 1.0, 2**30, gpus=8)
ALL = [TRAINERS, ENGINES]


def _nodes(count: int) -> list[dict[str, Any]]:
    capacity = {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"}
    return [
        {"metadata": {"name": f"n{n}"}, "spec": {}, "status": {"allocatable": capacity}} for n in range(count)
    ]


def _observed(*failing: str, **more: Any) -> Observed:
    reports = [NodeFailures(node=name, failures=2, reason="rank 3 died", avoided=True) for name in failing]
    reports.append(NodeFailures(node="n9", failures=1, reason="once"))
    report = controller_status("Training", node_failures=reports, **more)
    return Observed(RayClusterStatus(), (), report)


def _avoided(observed: Observed, nodes: int, used: dict[str, int] | None = None) -> set[str]:
    return avoided_names(failing_nodes(job(), observed, ALL, _nodes(nodes), used or {}))


def test_nodes_are_avoided_as_long_as_the_job_fits_on_others() -> None:
    assert _avoided(_observed("n0"), nodes=3) == {"n0"}, "the engine may run there"
    assert _avoided(_observed("n0"), nodes=2) == set(), "there are not enough others"
    assert _avoided(_observed("n0", "n1"), nodes=3) == {"n0"}, "the one with the most failures"
    assert _avoided(_observed("n0"), nodes=3, used={"n2": 1}) == set(), "other jobs use the rest"


def test_the_status_names_failing_nodes_and_outlives_the_controller() -> None:
    found = failing_nodes(job(), _observed("n0"), ALL, _nodes(3), {})
    assert [(one.node, one.failures, one.avoided) for one in found] == [("n0", 2, True), ("n9", 1, False)]
    status = {"failingNodes": [one.wire() for one in found]}
    assert failing_nodes(job() | {"status": status}, Observed(), ALL, _nodes(3), {}) == found


def test_training_pods_are_kept_off_by_an_affinity_and_engines_are_not() -> None:
    spec = spec_of(job())
    settings = OperatorSettings("t:1", "r:1")
    made = job_cluster(job(), spec, pool_of(spec), settings, False, failing=("host-0",)).wire()
    rules = {}
    for group in made["spec"]["workerGroupSpecs"]:
        affinity = group["template"]["spec"].get("affinity", {}).get("nodeAffinity", {})
        rules[group["groupName"]] = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    (term,) = rules.pop("trainer")["nodeSelectorTerms"]
    assert term["matchExpressions"] == [
        {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["host-0"]}
    ]
    assert not any(rules.values())


def test_a_user_asks_once_to_forget() -> None:
    manifest = job()
    manifest["metadata"]["annotations"] = {"rl.grpo.dev/forget-nodes": "replaced n0"}
    assert forget_request(manifest, _observed("n0")) == "replaced n0"
    assert forget_request(manifest, _observed("n0", forget_nodes="replaced n0")) is None
    assert forget_request(manifest, Observed()) is None and forget_request(job(), _observed("n0")) is None


def test_events_say_what_is_avoided_and_what_no_longer() -> None:
    one = FailingNodeStatus(node="n0", failures=2, message="rank 3 died", avoided=True).wire()
    before: dict[str, Any] = {"failingNodes": [one | {"avoided": False, "failures": 1}]}
    after = {"failingNodes": [one]}
    event = failing_event(before, after)
    assert event is not None and event.reason == "NodeAvoided" and event.warning
    assert event.message == "training pods avoid node n0 (2 failures, last: rank 3 died)"
    assert failing_event(after, after) is None
    allowed = failing_event(after, {})
    assert allowed is not None and allowed.message == "training pods may run on n0 again"
