"""Ray's start on a busy node: a node that the GCS does not know yet is waited for."""

import inspect

import pytest

from grpo_worker.roles.ray_start import PATIENCE, patient
from support.clocks import FakeClock


def test_a_node_that_registers_late_is_found() -> None:
    clock, asked = FakeClock(), []
    began = clock.now()

    def ask(address: str, node: str) -> dict[str, str]:
        asked.append((address, node))
        if clock.now() < began + PATIENCE / 2:
            raise RuntimeError("GCS cannot find the node")
        return {"id": node}

    assert patient(ask, clock)("head:6379", "f00") == {"id": "f00"}
    assert set(asked) == {("head:6379", "f00")} and len(asked) > 60  # Ray gives up after 30 seconds


def test_a_node_that_never_registers_is_an_error() -> None:
    def ask(address: str, node: str) -> None:
        raise RuntimeError(f"{address} knows no {node}")

    clock = FakeClock()
    began = clock.now()
    with pytest.raises(RuntimeError, match="head knows no f00"):
        patient(ask, clock)("head", "f00")
    assert clock.now() >= began + PATIENCE


def test_ray_has_the_function_that_is_replaced() -> None:
    from ray._private import node, services

    assert callable(services.get_node)
    assert "services.get_node(" in inspect.getsource(node.Node.__init__), "Ray asks for its node elsewhere"
