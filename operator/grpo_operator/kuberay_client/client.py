"""Async client of RayClusters. Errors keep their HTTP status; watches are kopf's."""

from typing import Any

from grpo_operator.kuberay_client.kube import Kube
from grpo_operator.kuberay_client.models import RayCluster


class RayClusterApi:
    """RayClusters of one API server."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    async def apply(self, cluster: RayCluster) -> dict[str, Any]:
        """Server-side apply; creates or updates. Returns the object as stored."""
        return await self._kube.apply("apis/ray.io/v1", "rayclusters", cluster.wire())
