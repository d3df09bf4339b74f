"""What the operator needs of the cluster besides objects: KubeRay, and CRDs as new as itself."""

import time

from grpo_operator.api.base import API_VERSION
from grpo_operator.api.crd import grpojob_crd, rolloutpool_crd
from grpo_operator.kuberay_client.client import RayClusterApi
from grpo_operator.kuberay_client.kube import Kube
from grpo_operator.observe.cache import Cache
from grpo_operator.plan.compatibility.crds import lacking

_AGAIN_SECONDS = 600.0


class Prerequisites:
    """Looks, and leaves what it found in the cache."""

    def __init__(self, kube: Kube, cache: Cache) -> None:
        self._kube = kube
        self._ray = RayClusterApi(kube)
        self._cache = cache
        self._looked = False
        self._next = 0.0

    async def look(self) -> bool:
        """Has anything changed since the last look?"""
        before = (self._cache.kuberay, self._cache.crds_lack)
        served = await self._ray.served()
        # KubeRay's schema is large: read again only when it came or went, and now and then.
        if served != bool(self._cache.kuberay) or time.monotonic() >= self._next:
            self._cache.kuberay = await self._ray.spec_fields() if served else frozenset()
            self._next = time.monotonic() + _AGAIN_SECONDS
        if self._cache.crds_lack or not self._looked:
            self._cache.crds_lack = await self._crds_lack()
            self._looked = True
        return before != (self._cache.kuberay, self._cache.crds_lack)

    async def _crds_lack(self) -> str:
        """What the cluster's CRDs lack of this operator's, or ""."""
        schemas = await self._kube.schemas(f"apis/{API_VERSION}")
        for crd in (grpojob_crd(), rolloutpool_crd()):
            kind = crd["spec"]["names"]["kind"]
            served = [schema for name, schema in schemas.items() if name.endswith(f".{kind}")]
            wanted = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
            parts = {"properties": {key: wanted[key] for key in ("spec", "status")}}
            text = lacking(kind, served[0] if served else {}, parts)
            if text:
                return text
        return ""
