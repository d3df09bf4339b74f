"""Leaves for both pools: engines are placed whole, training pods use the remaining nodes."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from grpo_operator.plan.capacity.topology import Leaves, assign, free_nodes

EIGHT = {f"leaf-{i}": 8 for i in range(8)}
FREE = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 9), min_size=1)


def test_an_even_split_uses_every_leaf_once() -> None:
    leaves = assign(EIGHT, trainers=32, engines=8, hosts=4)
    assert [count for _, count in leaves.rollout] == [2, 2, 2, 2]
    assert len(leaves.trainer) == 4 and not set(leaves.trainer) & {leaf for leaf, _ in leaves.rollout}


def test_training_pods_share_a_leaf_with_engines_if_necessary() -> None:
    leaves = assign(EIGHT, trainers=60, engines=1, hosts=4)
    assert leaves.rollout == (("leaf-0", 1),) and set(leaves.trainer) == set(EIGHT)


def test_engines_avoid_leaves_without_room_for_a_whole_engine() -> None:
    leaves = assign({"a": 7, "b": 8, "c": 3}, trainers=10, engines=2, hosts=4)
    assert leaves == Leaves(("a", "c"), (("b", 2),), reserved=("b",))


def test_scaling_moves_no_engine() -> None:
    eight = assign(EIGHT, 32, 8, 4)
    six = assign({leaf: 8 for leaf, _ in eight.rollout}, 32, 6, 4, eight)
    assert all(count <= dict(eight.rollout)[leaf] for leaf, count in six.rollout)
    assert sum(count for _, count in six.rollout) == 6 and six.trainer == eight.trainer
    assert assign({leaf: 8 for leaf, _ in eight.rollout}, 32, 8, 4, six) == eight
    two = assign({leaf: 8 for leaf, _ in eight.rollout}, 32, 2, 4, six)
    assert {leaf for leaf, _ in two.rollout} == {leaf for leaf, _ in eight.rollout}, "a group vanished"


def test_an_engine_leaves_a_leaf_that_lost_a_node() -> None:
    before = Leaves(("c",), (("a", 2), ("b", 1)))
    after = assign({"a": 7, "b": 8}, 8, 3, 4, before)
    assert after.rollout == (("a", 1), ("b", 2)) and after.trainer == ("c",)
    assert after.reserved == ("b",)
    assert assign({"a": 7, "b": 7}, 8, 3, 4, before) == before, "nowhere to go: wait"


def test_there_is_no_assignment_without_room_in_a_single_leaf() -> None:
    assert assign({"a": 3, "b": 3}, 0, 1, 4) == Leaves()


@given(FREE, st.integers(1, 9), st.integers(1, 5), FREE)
def test_assigned_engines_fit_and_training_pods_get_the_rest(
    free: dict[str, int], engines: int, hosts: int, later: dict[str, int]
) -> None:
    if sum(count // hosts for count in free.values()) < engines:
        return
    trainers = sum(free.values()) - engines * hosts
    first = assign(free, trainers, engines, hosts)
    second = assign(later, trainers, engines, hosts, first)
    for leaves, room in ((first, free), (second, later)):
        if leaves is second and second == first:
            continue
        if leaves.rollout:
            assert sum(count for _, count in leaves.rollout) == engines
            assert all(count * hosts <= room.get(leaf, 0) for leaf, count in leaves.rollout)
    taken = {leaf: count * hosts for leaf, count in first.rollout}
    assert sum(free[leaf] - taken.get(leaf, 0) for leaf in first.trainer) == trainers


def test_only_whole_free_nodes_count() -> None:
    def node(name: str, gpus: str, leaf: str | None, ready: str = "True") -> dict[str, Any]:
        labels = {"leaf": leaf} if leaf else {}
        offer = {"cpu": "8", "memory": "8Gi", "nvidia.com/gpu": gpus}
        conditions = [{"type": "Ready", "status": ready}]
        status = {"allocatable": offer, "conditions": conditions}
        return {"metadata": {"name": name, "labels": labels}, "spec": {}, "status": status}

    nodes = [node("a", "8", "x"), node("b", "4", "x"), node("c", "8", None), node("d", "8", "y")]
    nodes.append(node("e", "8", "z", ready="Unknown"))
    assert free_nodes(nodes, {}, {"d"}, "leaf", 8) == {"x": 1}
    assert free_nodes(nodes, {"a": 5, "d": 4}, set(), "leaf", 4) == {"x": 1, "y": 1}
    assert free_nodes(nodes, {"a": 5, "d": 5}, set(), "leaf", 4) == {"x": 1}
