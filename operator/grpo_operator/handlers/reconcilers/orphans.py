"""RayClusters without an owner reference, which KAI needs: ours to delete when the owner is gone.

KAI groups pods by their topmost owner and knows RayClusters, but not GRPOJobs.
"""

from typing import Any

from grpo_operator.api import names
from grpo_operator.api.names import owner_in_labels
from grpo_operator.apply.writer import Writer
from grpo_operator.observe.cache import Cache


def owner_uid(cluster: dict[str, Any]) -> str | None:
    """UID of the GRPOJob or RolloutPool for which a RayCluster was made."""
    annotations = cluster["metadata"].get("annotations") or {}
    return annotations.get(names.OWNER_UID)


async def delete_orphans(cache: Cache, writer: Writer) -> None:
    """Delete RayClusters whose owner is gone and that nothing else collects.

    The cache may lag behind a new owner: the API server itself is asked before anything is deleted.
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
