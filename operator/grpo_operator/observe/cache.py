"""In-memory cache of the watched objects, reduced to the fields that the operator reads."""

import json
from collections import Counter, defaultdict
from typing import Any

from grpo_operator.api.base import Model
from grpo_operator.api.names import Owner, owner_in_labels
from grpo_operator.observe.watched_kinds import WATCHED, Object, reduced
from grpo_operator.plan.capacity.feasibility import node_capacity
from grpo_operator.plan.gpu_health.strikes import Records

Key = tuple[str, str]  # namespace ("" for nodes), name


class Cache:
    """One table per kind, keyed by (namespace, name). kopf's watches rebuild it after a restart."""

    def __init__(self) -> None:
        self._tables: dict[str, dict[Key, Object]] = {kind.plural: {} for kind in WATCHED}
        self._pods: defaultdict[Owner, dict[str, Object]] = defaultdict(dict)
        self.jobs = self._tables["grpojobs"]
        self.pools = self._tables["rolloutpools"]
        self.ray_clusters = self._tables["rayclusters"]
        self.kuberay_fields: frozenset[str] = frozenset()  # of RayCluster.spec; empty without KubeRay
        self.gpu_records: Records = {}  # strikes against nodes with sick GPUs
        self.crd_problem = ""  # message when the installed CRDs are older than the operator
        self.older_statuses: dict[str, Object] = {}  # schemas of the statuses that are older, by plural
        self.served_specs: dict[type[Model], Object] = {}  # schemas of the specs that the API server has

    @property
    def nodes(self) -> list[Object]:
        """Return all nodes."""
        return list(self._tables["nodes"].values())

    @property
    def usable_nodes(self) -> list[Object]:
        """Return the nodes that are not in quarantine for sick GPUs."""
        kept = (node for node in self.nodes if not self._quarantined(node["metadata"]["name"]))
        return list(kept)

    def is_usable(self, name: str) -> bool:
        """Return whether a node accepts new pods and is not in quarantine."""
        node = self.node(name)
        return node is not None and node_capacity(node) is not None and not self._quarantined(name)

    def _quarantined(self, node: str) -> bool:
        record = self.gpu_records.get(node)
        return record is not None and record.quarantined

    def node(self, name: str) -> Object | None:
        """Return a node by name, or None."""
        return self._tables["nodes"].get(("", name))

    def live(self, plural: str, key: Key) -> Object | None:
        """Return a child as it is in the cluster, without its status, or None."""
        kept = self._tables[plural].get(key)
        if kept is None or "live" not in kept:
            return kept
        return dict(json.loads(kept["live"]))

    def owners(self) -> list[Owner]:
        """Return every GRPOJob and RolloutPool."""
        return [
            *(Owner("GRPOJob", *key) for key in self.jobs),
            *(Owner("RolloutPool", *key) for key in self.pools),
        ]

    def jobs_of_pool(self, namespace: str, pool: str) -> list[Owner]:
        """Return the jobs whose poolRef names a RolloutPool."""
        references = {key: job["spec"]["rollout"].get("poolRef") for key, job in self.jobs.items()}
        return [
            Owner("GRPOJob", *k)
            for k, ref in references.items()
            if ref == {"name": pool} and k[0] == namespace
        ]

    def owner(self, owner: Owner) -> Object | None:
        """Return the GRPOJob or RolloutPool object of an owner, or None."""
        table = self.jobs if owner.kind == "GRPOJob" else self.pools
        return table.get((owner.namespace, owner.name))

    def owner_of_child(self, plural: str, key: Key) -> Owner | None:
        """Return the owner in the labels of a cached child, or None."""
        kept = self._tables[plural].get(key)
        return owner_in_labels(kept) if kept else None

    def keys(self, plural: str) -> set[Key]:
        """Return the keys of all cached objects of a kind."""
        return set(self._tables[plural])

    def version(self, plural: str, key: Key) -> str | None:
        """Return the resourceVersion of a cached object, or None."""
        kept = self._tables[plural].get(key)
        return kept["metadata"].get("resourceVersion") if kept else None

    def pods_of(self, owner: Owner) -> tuple[Object, ...]:
        """Return the pods that carry this owner's label."""
        return tuple(self._pods.get(owner, {}).values())

    def nodes_of_others(self, owners: set[Owner]) -> set[str]:
        """Return the names of the nodes with pods of other owners than these, terminating pods included."""
        return set(self.gpus_of_others(owners))

    def gpus_of_others(self, owners: set[Owner]) -> Counter[str]:
        """Return the GPUs used by pods of other owners than these, by node; nodes may have 0."""
        used = Counter[str]()
        for owner, pods in self._pods.items():
            if owner not in owners:
                for pod in pods.values():
                    if pod["spec"].get("nodeName"):
                        used[pod["spec"]["nodeName"]] += pod["spec"]["gpus"]
        return used

    def store(self, plural: str, event: dict[str, Any]) -> None:
        """Apply a watch event to the cache.

        kopf orders the events of one object, but not those of an object and of its successor with the same
        name. Events of an object that has been replaced are dropped.
        """
        key = key_of(event["object"])
        if _of_predecessor(event, self._tables[plural].get(key)):
            return
        if event["type"] == "DELETED":
            self.forget(plural, key)
            return
        kept = reduced(plural, event["object"])
        self._tables[plural][key] = kept
        owner = owner_in_labels(kept)
        if plural == "pods" and owner:
            self._pods[owner][key[1]] = kept

    def forget(self, plural: str, key: Key) -> None:
        """Drop an object that no longer exists."""
        gone = self._tables[plural].pop(key, None)
        owner = owner_in_labels(gone) if gone else None
        if plural == "pods" and owner is not None and owner in self._pods:
            self._pods[owner].pop(key[1], None)
            if not self._pods[owner]:
                del self._pods[owner]


def _of_predecessor(event: dict[str, Any], kept: Object | None) -> bool:
    """Return whether the event is of an object that the cached one has replaced."""
    metadata = event["object"]["metadata"]
    if kept is None or kept["metadata"].get("uid") == metadata.get("uid"):
        return False
    if event["type"] == "DELETED":
        return True
    created: str = kept["metadata"].get("creationTimestamp", "")
    return bool(created > metadata.get("creationTimestamp", ""))


def key_of(obj: Object) -> Key:
    """Return (namespace, name) of an object."""
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]
