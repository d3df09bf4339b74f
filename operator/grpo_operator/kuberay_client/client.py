"""Async client for RayClusters. Errors keep their HTTP status. Watching is left to kopf."""

from typing import Any

from grpo_operator.kuberay_client.kube import Kube
from grpo_operator.kuberay_client.models import RayCluster

_GROUP = "apis/ray.io/v1"


class RayClusterApi:
    """API of the RayClusters of one cluster."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    async def apply(self, cluster: RayCluster) -> dict[str, Any]:
        """Create or update by server-side apply; return the object as stored."""
        return await self._kube.apply(_GROUP, "rayclusters", cluster.wire())

    async def served(self) -> bool:
        """Return whether the API server serves RayClusters, that is, whether KubeRay is installed."""
        return "rayclusters" in await self._kube.kinds(_GROUP)

    async def spec_fields(self) -> frozenset[str]:
        """Return the names of the ``spec`` fields of the installed KubeRay; empty without KubeRay.

        Server-side apply refuses any other field.
        """
        schemas = await self._kube.schemas(_GROUP)
        kinds = [schema for name, schema in schemas.items() if name.endswith(".RayCluster")]
        return frozenset(kinds[0]["properties"]["spec"]["properties"]) if kinds else frozenset()

    async def delete(self, namespace: str, name: str) -> None:
        """Delete with background propagation; do nothing when it does not exist."""
        await self._kube.delete(_GROUP, "rayclusters", namespace, name)
