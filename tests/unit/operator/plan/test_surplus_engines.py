"""Engines that leave a group which gets smaller: the broken ones."""

from typing import Any

from grpo_operator.plan.capacity.surplus_engines import engines_to_delete
from support.objects import pod


def _engine(name: str, *nodes: str | None, group: str = "g") -> list[dict[str, Any]]:
    pods = []
    for number, node in enumerate(nodes):
        made = pod("rollout", number)
        made["metadata"]["name"] = f"{name}-{number}"
        made["metadata"]["labels"] |= {"ray.io/group": group, "ray.io/worker-group-replica-name": name}
        pods.append(made | {"spec": {"nodeName": node} if node else {}})
    return pods


def test_the_engine_on_an_unusable_node_goes_and_not_any() -> None:
    pods = [*_engine("a", "n1", "n2"), *_engine("b", "n3", "bad"), *_engine("c", "n4", None)]
    usable = {"n1", "n2", "n3", "n4"}.__contains__
    assert engines_to_delete(pods, {"g": 2}, usable) == {"g": ["b-0"]}
    assert engines_to_delete(pods, {"g": 1}, usable) == {"g": ["b-0", "c-0"]}
    assert engines_to_delete(pods, {"g": 3}, usable) == {}, "the group does not get smaller"


def test_kuberay_chooses_among_sound_engines() -> None:
    pods = [*_engine("a", "n1"), *_engine("b", "n2", group="h")]
    assert engines_to_delete(pods, {"g": 0, "h": 1, "trainer": 4}, lambda _: True) == {}


def test_an_engine_of_one_pod_has_no_replica_name() -> None:
    (single,) = _engine("a", None)
    del single["metadata"]["labels"]["ray.io/worker-group-replica-name"]
    assert engines_to_delete([single, pod("trainer")], {"g": 0}, lambda _: True) == {"g": ["a-0"]}
