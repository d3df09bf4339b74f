"""Feasibility of pods on the nodes of a cluster: quantities, packing, messages."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_operator.plan.capacity.feasibility import PodRequest, infeasible, quantity


def node(name: str, cpu: str = "2", memory: str = "24Gi", gpus: int = 0, **spec: Any) -> dict[str, Any]:
    offer = {"cpu": cpu, "memory": memory, "nvidia.com/gpu": str(gpus)}
    return {"metadata": {"name": name, "labels": {}}, "spec": spec, "status": {"allocatable": offer}}


def need(count: int, cpu: float = 1, gpus: int = 0) -> PodRequest:
    return PodRequest("trainer", "spec.trainer.nodes", count, cpu, 2**30, gpus)


def test_too_few_nodes_names_field_value_and_remedy() -> None:
    message = infeasible([need(4, gpus=8)], [node("a", "64", gpus=8), node("b", "64", gpus=8)])
    assert message is not None
    assert "spec.trainer.nodes=4" in message and "only 2 of 4" in message and "add nodes or lower" in message


def test_cordoned_nodes_do_not_count() -> None:
    assert infeasible([need(1)], [node("a", unschedulable=True)]) is not None
    assert infeasible([need(1)], [node("a")]) is None


def test_a_node_has_the_ports_of_one_pod_on_its_network() -> None:
    nodes = [node("a", "64", gpus=8), node("b", "64", gpus=8)]
    pods = replace(need(3, gpus=4), host_network=True)
    message = infeasible([pods], nodes)
    assert message is not None and "only 2 of 3 trainer pods" in message
    assert "one on a node because of scheduling.rdma.hostNetwork" in message
    assert infeasible([replace(pods, count=2)], nodes) is None
    assert infeasible([replace(pods, count=2), need(2, gpus=4)], nodes) is None, "the others use no ports"


@given(nodes=st.integers(1, 8), pods=st.integers(1, 20))
def test_equal_pods_fit_if_their_sum_fits(nodes: int, pods: int) -> None:
    """Pods of one core on nodes of two: first fit is exact here."""
    message = infeasible([need(pods)], [node(str(i)) for i in range(nodes)])
    assert (message is None) == (pods <= 2 * nodes)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2", 2),
        ("500m", 0.5),
        ("1.5", 1.5),
        ("2Gi", 2**31),
        ("1000Ki", 1024000),
        ("100k", 1e5),
        ("3M", 3e6),
        ("1e3", 1e3),
    ],
)
def test_quantities_are_written_like_the_api_servers(text: str, value: float) -> None:
    assert quantity(text) == value


def test_an_invalid_quantity_is_named() -> None:
    with pytest.raises(ValueError, match="'2GB' is not a Kubernetes quantity"):
        quantity("2GB")
