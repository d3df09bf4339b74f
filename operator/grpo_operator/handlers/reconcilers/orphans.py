"""Deletes RayClusters without an owner reference when their owner is gone.

With the gang scheduler KAI, RayClusters have no owner reference: KAI groups pods by their topmost owner, and
it knows RayClusters but not GRPOJobs. So the garbage collector does not delete them.
"""

from typing import Any

from grpo_operator.api import names
from grpo_operator.api.names import owner_in_labels
from grpo_operator.apply.writer import Writer
from grpo_operator.observe.cache import Cache


def owner_uid(cluster: dict[str, Any]) -> str | None:
    """Return the UID of the GRPOJob or RolloutPool that a RayCluster was made for."""
    annotations = cluster["metadata"].get("annotations") or {}
    return annotations.get(names.OWNER_UID)


async def delete_orphans(cache: Cache, writer: Writer) -> None:
    """Delete RayClusters that have no owner reference and whose owner is gone.

    The cache may lag behind a new owner, so the API server is asked before anything is deleted.
    """
    for (namespace, name), cluster in list(cache.ray_clusters.items()):
        meta, owner = cluster["metadata"], owner_in_labels(cluster)
        if meta.get("ownerReferences") or meta.get("deletionTimestamp") or owner is None:
            continue
        known = cache.owner(owner)
        if known is not None and known["metadata"]["uid"] == owner_uid(cluster):
            continue
        if await writer.uid_of(owner) != owner_uid(cluster):
            await writer.delete_ray_cluster(namespace, name)
