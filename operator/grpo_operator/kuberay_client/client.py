"""Async client of RayClusters: get, apply, delete. Errors keep their HTTP status."""

from typing import Any

from grpo_operator.kuberay_client.kube import Kube
from grpo_operator.kuberay_client.models import RayCluster, RayClusterStatus

_RESOURCE = ("apis/ray.io/v1", "rayclusters")


class RayClusterApi:
    """RayClusters of one API server."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    async def get(self, namespace: str, name: str) -> dict[str, Any] | None:
        """The object, or None when it does not exist."""
        return await self._kube.get(*_RESOURCE, namespace, name)

    async def status(self, namespace: str, name: str) -> RayClusterStatus | None:
        found = await self.get(namespace, name)
        return RayClusterStatus.model_validate(found.get("status") or {}) if found else None

    async def apply(self, cluster: RayCluster) -> dict[str, Any]:
        """Server-side apply; creates or updates."""
        return await self._kube.apply(*_RESOURCE, cluster.wire())

    async def delete(self, namespace: str, name: str) -> None:
        """Delete; fine when it does not exist."""
        await self._kube.delete(*_RESOURCE, namespace, name)
