"""Chooses the engines that leave a network leaf which can hold fewer of them (pure)."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from grpo_operator.api import names

_Pod = dict[str, Any]


def engines_to_delete(
    pods: Iterable[_Pod], wanted: Mapping[str, int], usable: Callable[[str], bool]
) -> dict[str, list[str]]:
    """Return a pod of each engine that goes, by worker group; KubeRay deletes the other pods with it.

    KubeRay would delete any engine of a group that gets smaller. Those go first that have a pod without a
    node, or on a node that is not ``usable``. ``wanted``: engines of each group.
    """
    engines: defaultdict[str, defaultdict[str, list[_Pod]]] = defaultdict(lambda: defaultdict(list))
    for pod in pods:
        labels = pod["metadata"]["labels"]
        if labels.get(names.POOL_LABEL) == names.ROLLOUT and names.GROUP in labels:
            name = labels.get(names.REPLICA_NAME, pod["metadata"]["name"])
            engines[labels[names.GROUP]][name].append(pod)
    surplus = {group: len(engines[group]) - count for group, count in wanted.items()}
    found = {group: _broken(engines[group], usable)[:count] for group, count in surplus.items() if count > 0}
    return {group: chosen for group, chosen in found.items() if chosen}


def _broken(engines: Mapping[str, list[_Pod]], usable: Callable[[str], bool]) -> list[str]:
    """Return the first pod of each broken engine, by name."""
    hosts = {name: {pod["spec"].get("nodeName") for pod in pods} for name, pods in engines.items()}
    broken = sorted(name for name, nodes in hosts.items() if not all(node and usable(node) for node in nodes))
    return [min(pod["metadata"]["name"] for pod in engines[name]) for name in broken]
