"""Async client of RayClusters. Errors keep their HTTP status; watches are kopf's."""

from typing import Any

from grpo_operator.kuberay_client.kube import Kube
from grpo_operator.kuberay_client.models import RayCluster

_GROUP = "apis/ray.io/v1"


class RayClusterApi:
    """RayClusters of one API server."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube

    async def apply(self, cluster: RayCluster) -> dict[str, Any]:
        """Server-side apply; creates or updates. Returns the object as stored."""
        return await self._kube.apply(_GROUP, "rayclusters", cluster.wire())

    async def served(self) -> bool:
        """Does the API server know RayClusters, that is: is KubeRay installed?"""
        return "rayclusters" in await self._kube.kinds(_GROUP)

    async def spec_fields(self) -> frozenset[str]:
        """Names of the fields of ``spec`` that the installed KubeRay knows; empty without KubeRay.

        Server-side apply refuses the others.
        """
        schemas = await self._kube.schemas(_GROUP)
        found = [s for name, s in schemas.items() if name.endswith(".RayCluster")]
        return frozenset(found[0]["properties"]["spec"]["properties"]) if found else frozenset()

    async def delete(self, namespace: str, name: str) -> None:
        """Delete in the background; fine when it does not exist."""
        await self._kube.delete(_GROUP, "rayclusters", namespace, name)
