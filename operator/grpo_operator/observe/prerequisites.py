"""Prerequisites in the cluster: KubeRay, and CRDs that are as new as the operator."""

import time
from functools import cache
from typing import Any

from grpo_operator.api.base import API_VERSION, Model
from grpo_operator.api.crd import grpojob_crd, rolloutpool_crd
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.kuberay_client.client import RayClusterApi
from grpo_operator.kuberay_client.kube import Kube
from grpo_operator.observe.cache import Cache
from grpo_operator.plan.compatibility import crd_problem

_KUBERAY_SECONDS = 600.0  # between two reads of KubeRay's schema, which is large
_CRD_SECONDS = 60.0  # between two reads of the operator's own schemas
_SPECS: dict[str, type[Model]] = {"GRPOJob": GRPOJobSpec, "RolloutPool": RolloutPoolSpec}


@cache
def _own_crds() -> tuple[dict[str, Any], ...]:
    return grpojob_crd(), rolloutpool_crd()  # takes a while


class Prerequisites:
    """Detects the installed KubeRay version and CRD schemas and stores them in the cache."""

    def __init__(self, kube: Kube, cache: Cache) -> None:
        self._kube = kube
        self._ray = RayClusterApi(kube)
        self._cache = cache
        self._next_kuberay = self._next_crds = 0.0

    async def refresh(self) -> bool:
        """Update the cache; return whether anything changed."""
        before = self._found()
        served = await self._ray.served()
        if served != bool(self._cache.kuberay_fields) or time.monotonic() >= self._next_kuberay:
            self._cache.kuberay_fields = await self._ray.spec_fields() if served else frozenset()
            self._next_kuberay = time.monotonic() + _KUBERAY_SECONDS
        if self._cache.crd_problem or time.monotonic() >= self._next_crds:
            self._cache.crd_problem = await self._crd_problem()
            self._next_crds = time.monotonic() + _CRD_SECONDS
        return before != self._found()

    def _found(self) -> tuple[object, ...]:
        return self._cache.kuberay_fields, self._cache.crd_problem, self._cache.served_specs

    async def _crd_problem(self) -> str:
        """Return what the installed CRDs lack of this operator's CRDs, or ""; note their specs."""
        schemas, problems = await self._kube.schemas(f"apis/{API_VERSION}"), []
        specs: dict[type[Model], dict[str, Any]] = {}
        self._cache.older_statuses = {}
        for crd in _own_crds():
            kind = crd["spec"]["names"]["kind"]
            served: dict[str, Any] = next((s for name, s in schemas.items() if name.endswith(f".{kind}")), {})
            schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
            needed = {"properties": {key: schema[key] for key in ("spec", "status")}}
            specs[_SPECS[kind]] = served.get("properties", {}).get("spec", {})
            problem = crd_problem(kind, served, needed)
            if problem:
                problems.append(problem)
                status = served.get("properties", {}).get("status", {})
                self._cache.older_statuses[crd["spec"]["names"]["plural"]] = status
        self._cache.served_specs = specs
        return problems[0] if problems else ""
