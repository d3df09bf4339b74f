"""Objects as the watches last delivered them, reduced to what the operator reads."""

import json
from collections import Counter, defaultdict
from typing import Any

from grpo_operator.api.names import Owner, owner_in_labels
from grpo_operator.observe.watched_kinds import WATCHED, Object, reduced

Key = tuple[str, str]  # namespace ("" for nodes), name


class Cache:
    """One table a kind, keyed by (namespace, name). Rebuilt by listing after a restart."""

    def __init__(self) -> None:
        self._tables: dict[str, dict[Key, Object]] = {kind.plural: {} for kind in WATCHED}
        self._pods: defaultdict[Owner, dict[str, Object]] = defaultdict(dict)
        self.jobs = self._tables["grpojobs"]
        self.pools = self._tables["rolloutpools"]
        self.ray_clusters = self._tables["rayclusters"]
        self.kuberay: frozenset[str] = frozenset()  # fields of a RayCluster's spec
        self.crds_lack = ""  # what an older CRD lacks, with the remedy

    @property
    def nodes(self) -> list[Object]:
        return list(self._tables["nodes"].values())

    def node(self, name: str) -> Object | None:
        return self._tables["nodes"].get(("", name))

    def live(self, plural: str, key: Key) -> Object | None:
        """A child as it is in the cluster, without its status."""
        kept = self._tables[plural].get(key)
        if kept is None or "live" not in kept:
            return kept
        return dict(json.loads(kept["live"]))

    def owners(self) -> list[Owner]:
        """Every GRPOJob and RolloutPool."""
        return [
            *(Owner("GRPOJob", *key) for key in self.jobs),
            *(Owner("RolloutPool", *key) for key in self.pools),
        ]

    def jobs_of_pool(self, namespace: str, pool: str) -> list[Owner]:
        """Jobs whose poolRef names a RolloutPool."""
        references = {key: job["spec"]["rollout"].get("poolRef") for key, job in self.jobs.items()}
        return [
            Owner("GRPOJob", *k)
            for k, ref in references.items()
            if ref == {"name": pool} and k[0] == namespace
        ]

    def owner(self, owner: Owner) -> Object | None:
        """The object of an owner."""
        known = self.jobs if owner.kind == "GRPOJob" else self.pools
        return known.get((owner.namespace, owner.name))

    def keys(self, plural: str) -> set[Key]:
        return set(self._tables[plural])

    def pods_of(self, owner: Owner) -> tuple[Object, ...]:
        """Pods labelled with this owner."""
        return tuple(self._pods.get(owner, {}).values())

    def nodes_of_all_but(self, owners: set[Owner]) -> set[str]:
        """Names of the nodes on which pods of other owners than these run or end."""
        return set(self.gpus_of_all_but(owners))

    def gpus_of_all_but(self, owners: set[Owner]) -> Counter[str]:
        """GPUs that pods of other owners than these take, by node; 0 where they take none."""
        used = Counter[str]()
        for owner, pods in self._pods.items():
            if owner not in owners:
                for pod in pods.values():
                    if pod["spec"].get("nodeName"):
                        used[pod["spec"]["nodeName"]] += pod["spec"]["gpus"]
        return used

    def store(self, plural: str, event: dict[str, Any]) -> None:
        """Take over a watch event.

        kopf hands out the events of an object in order, but those of an object and of one that was
        made anew under its name in any order: what is older than the cached one is no news.
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
    """Does the event tell of an object that the kept one has replaced?"""
    told = event["object"]["metadata"]
    if kept is None or kept["metadata"].get("uid") == told.get("uid"):
        return False
    if event["type"] == "DELETED":
        return True
    created: str = kept["metadata"].get("creationTimestamp", "")
    return bool(created > told.get("creationTimestamp", ""))


def key_of(obj: Object) -> Key:
    """(namespace, name) of an object."""
    return obj["metadata"].get("namespace", ""), obj["metadata"]["name"]
