"""Jobs start whole or wait, in a fixed order."""

from typing import Any

from grpo_operator.api.names import Owner
from grpo_operator.plan.capacity.admission import Claim, waiting
from grpo_operator.plan.capacity.feasibility import PodRequest


def _nodes(count: int) -> list[dict[str, Any]]:
    room = {"cpu": "64", "memory": "512Gi", "nvidia.com/gpu": "8"}
    return [
        {"metadata": {"name": f"n{i}"}, "spec": {}, "status": {"allocatable": room}} for i in range(count)
    ]


def _owner(name: str) -> Owner:
    return Owner("GRPOJob", "ns", name)


def _claim(name: str, pods: int, since: str = "2026-01-01", holds: bool = False) -> Claim:
    return Claim(_owner(name), since, holds, [PodRequest("trainer", "spec.trainer.nodes", pods, 8, 2**30, 8)])


def test_the_second_of_two_large_jobs_waits_whole() -> None:
    ((key, message),) = waiting([_claim("b", 3), _claim("a", 3)], _nodes(4)).items()
    assert key == _owner("b")
    assert "spec.trainer.nodes=3: only 1 of 3 trainer pods" in message and "waiting for other" in message


def test_jobs_with_pods_go_first_then_older_jobs() -> None:
    claims = [_claim("old", 3, "2026-01-01"), _claim("new", 3, "2026-02-01", holds=True)]
    assert set(waiting(claims, _nodes(4))) == {_owner("old")}
    claims = [_claim("x", 3, "2026-02-01"), _claim("y", 3, "2026-01-01")]
    assert set(waiting(claims, _nodes(4))) == {_owner("x")}


def test_a_small_job_overtakes_a_waiting_large_one() -> None:
    claims = [_claim("a", 3), _claim("b", 3), _claim("c", 1)]
    assert set(waiting(claims, _nodes(4))) == {_owner("b")}


def test_a_job_with_more_pods_than_fit_does_not_wait() -> None:
    assert waiting([_claim("a", 5, holds=True)], _nodes(4)) == {}


def test_draining_nodes_count_as_occupied() -> None:
    assert set(waiting([_claim("a", 3)], _nodes(4), leaving=["n0", "n1"])) == {_owner("a")}
    assert waiting([_claim("a", 2)], _nodes(4), leaving=["n0", "n1"]) == {}
