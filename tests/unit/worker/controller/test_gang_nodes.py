"""The choice of a gang's nodes among those of its pool."""

from typing import Any

from grpo_worker.controller.training.gang_nodes import PoolNode, choose, pool_nodes, spares_of

A, B, C = (PoolNode(name, f"10.0.0.{number}", 2) for number, name in enumerate("abc"))


def _ray_node(node: PoolNode, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {
        "NodeID": node.id,
        "NodeManagerAddress": node.address,
        "Alive": alive,
        "Resources": {"trainer": float(node.slots)} | resources,
    }


def test_nodes_of_the_pool_are_those_that_live_and_advertise_it() -> None:
    head = {"NodeID": "h", "NodeManagerAddress": "10.0.0.9", "Alive": True, "Resources": {"CPU": 1.0}}
    assert pool_nodes([head, _ray_node(A, GPU=8.0), _ray_node(B, alive=False)], "trainer") == [A]


def test_a_gang_fills_whole_nodes_and_leaves_the_last_ones_as_spares() -> None:
    places = choose([C, B, A], 4, ())
    assert places == [A, A, B, B] and spares_of([C, B, A], places) == [C]


def test_a_gang_stays_on_its_nodes() -> None:
    assert choose([A, B, C], 4, {"b", "c"}) == [B, B, C, C]
    assert choose([A, C], 4, {"b", "c"}) == [C, C, A, A], "b is lost"


def test_a_node_that_is_about_to_end_is_left() -> None:
    assert choose([A, B, C], 4, {"a", "b"}, leaving={"a"}) == [B, B, C, C]
    assert choose([A, B], 4, {"a", "b"}, leaving={"a"}) is None, "no rank starts there"


def test_a_gang_starts_whole_or_not_at_all() -> None:
    assert choose([A, B], 5, ()) is None and choose([], 1, ()) is None
