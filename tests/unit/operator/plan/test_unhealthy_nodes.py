"""The pods that leave unhealthy and failing nodes, a share of them at a time."""

from typing import Any

from grpo_operator.api.v1alpha1.scheduling import SchedulingSpec
from grpo_operator.plan.capacity.unhealthy_nodes import Moves, moves
from support.objects import NOW, pod

SCHEDULING = SchedulingSpec.model_validate(
    {"unhealthyNodes": {"conditions": ["GpuMemWatch"], "taints": ["nvidia.com/sick"]}}
)
SICK = [{"type": "GpuMemWatch", "status": "True"}]


def _pod(
    number: int, pool: str = "trainer", phase: str = "Running", deleting: bool = False
) -> dict[str, Any]:
    made = pod(pool, number, deleting=deleting) | {"spec": {"nodeName": f"n{number}"}}
    made["status"]["phase"] = phase
    return made


def _node(conditions: Any = (), taints: Any = (), cordoned: bool = True) -> dict[str, Any]:
    spec: dict[str, Any] = {"taints": list(taints)} | ({"unschedulable": True} if cordoned else {})
    return {"spec": spec, "status": {"conditions": list(conditions)}}


def _moves(pods: list[dict[str, Any]], wanted: int, sick: int, percent: int = 10, avoided: Any = ()) -> Moves:
    """Return the moves of a job whose first ``sick`` nodes are unhealthy."""
    unhealthy = SCHEDULING.unhealthy_nodes.model_copy(update={"max_nodes_percent": percent})
    scheduling = SCHEDULING.model_copy(update={"unhealthy_nodes": unhealthy})
    nodes = {f"n{number}": _node(SICK if number < sick else ()) for number in range(100)}
    return moves(pods, wanted, nodes.get, scheduling, avoided)


def _names(found: Moves) -> list[str]:
    return [pod["spec"]["nodeName"] for pod, _ in found.now]


def test_pods_leave_cordoned_nodes_with_a_mark() -> None:
    nodes = {
        "n0": _node(SICK),
        "n1": _node(SICK, cordoned=False),
        "n2": _node(taints=[{"key": "nvidia.com/sick"}]),
        "n3": _node([{"type": "GpuMemWatch", "status": "False"}]),
    }
    pods = [_pod(number) for number in range(5)]  # the fifth is on a node that nobody knows
    wide = SCHEDULING.unhealthy_nodes.model_copy(update={"max_nodes_percent": 100})
    found = moves(pods, 5, nodes.get, SCHEDULING.model_copy(update={"unhealthy_nodes": wide}))
    assert [why for _, why in found.now] == [
        "pod tiny-moe-trainer-0 leaves node n0: condition GpuMemWatch",
        "pod tiny-moe-trainer-2 leaves node n2: taint nvidia.com/sick",
    ]
    assert not found.held
    assert moves(pods, 5, nodes.get, SchedulingSpec()).now == []


def test_an_agent_gone_wild_moves_only_a_share_of_the_nodes_at_a_time() -> None:
    pods = [_pod(number) for number in range(40)]
    found = _moves(pods, 40, sick=40)
    assert len(found.now) == 4 and "maxNodesPercent=10 of 40" in found.held
    # The four are gone: the others wait until their replacements run elsewhere.
    rest = [pod for pod in pods if pod["spec"]["nodeName"] not in _names(found)]
    assert _moves(rest, 40, sick=40).now == []
    starting = [_pod(number, phase="Pending") for number in range(50, 54)]
    assert _moves(rest + starting, 40, sick=40).now == []
    assert len(_moves(rest + [_pod(number) for number in range(50, 54)], 40, sick=40).now) == 4


def test_the_same_pods_leave_until_the_cache_has_seen_it() -> None:
    pods = [_pod(number) for number in range(40)]
    found = _moves(pods, 40, sick=40)
    assert _names(_moves(pods, 40, sick=40)) == _names(found)
    seen = [_pod(n, deleting=f"n{n}" in _names(found)) for n in range(40)]
    assert _moves(seen, 40, sick=40).now == []
    assert NOW, "deleted pods carry a time"


def test_a_small_job_leaves_one_node_at_a_time_and_all_pods_of_it() -> None:
    pods = [_pod(0), _pod(0, "rollout"), _pod(1), _pod(2)]
    assert _names(_moves(pods, 4, sick=2)) == ["n0", "n0"]


def test_a_pod_that_cannot_start_on_a_sick_node_leaves_it() -> None:
    pods = [_pod(0, phase="Pending"), _pod(1), _pod(2)]
    assert _names(_moves(pods, 3, sick=1)) == ["n0"]


def test_only_training_pods_leave_a_node_on_which_ranks_fail() -> None:
    pods = [_pod(0), _pod(0, "rollout"), _pod(1)]
    ((moved, why),) = _moves(pods, 3, sick=0, avoided={"n0"}).now
    assert moved is pods[0] and "ranks of the job have failed there" in why
