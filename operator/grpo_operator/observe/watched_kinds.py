"""Watched kinds, and the reduction of their objects to the fields that are cached (pure)."""

import json
import sys
from dataclasses import dataclass
from typing import Any

from grpo_operator.api.base import GROUP, VERSION
from grpo_operator.api.names import GROUP as RAY_GROUP
from grpo_operator.api.names import HOST_INDEX, OWNER_LABELS, POOL_LABEL, REPLICA_NAME, TLS_LABEL
from grpo_operator.plan.capacity.feasibility import GPU
from grpo_operator.plan.status.container_failures import failing
from grpo_operator.plan.status.unschedulable import unschedulable

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Watched:
    """One watched kind. ``owned``: only objects with the label of a GRPOJob or RolloutPool are watched.
    ``label``: a label on all of them, by which the API server filters the rest.
    """

    group: str
    version: str
    plural: str
    owned: bool = True
    namespaced: bool = True
    label: str = ""

    @property
    def path(self) -> str:
        """Return the path of its API group and version."""
        return f"apis/{self.group}/{self.version}" if self.group else f"api/{self.version}"

    @property
    def selectors(self) -> tuple[str, ...]:
        """Return label selectors that together select the watched objects."""
        common = [self.label] if self.label else []
        return tuple(",".join([owner, *common]) for owner in OWNER_LABELS.values()) if self.owned else ("",)


WATCHED = (
    Watched(GROUP, VERSION, "grpojobs", owned=False),
    Watched(GROUP, VERSION, "rolloutpools", owned=False),
    Watched("ray.io", "v1", "rayclusters"),
    Watched("", "v1", "pods", label=POOL_LABEL),
    Watched("", "v1", "configmaps"),
    Watched("", "v1", "services"),
    Watched("policy", "v1", "poddisruptionbudgets"),
    Watched("networking.k8s.io", "v1", "networkpolicies"),
    Watched("", "v1", "nodes", owned=False, namespaced=False),
)
_POD_METADATA = ("name", "namespace", "uid", "creationTimestamp", "deletionTimestamp", "resourceVersion")
_POD_LABELS = (*OWNER_LABELS.values(), POOL_LABEL, RAY_GROUP, REPLICA_NAME, HOST_INDEX, TLS_LABEL)


def reduced(plural: str, obj: Object) -> Object:
    """Return the part of an object that is cached.

    Hundreds of jobs have tens of thousands of pods, of which a few fields are kept. RayClusters are large:
    they and the other children are kept as JSON text, under ``live``.
    """
    if plural in ("grpojobs", "rolloutpools"):
        return _without_managers(obj)
    if plural == "pods":
        return _pod(obj)
    if plural == "nodes":
        return _node(obj)
    whole = _without_managers(obj)
    status = whole.pop("status", None) or {}
    suspend = {key: value for key, value in (obj.get("spec") or {}).items() if key == "suspend"}
    live = json.dumps(whole, separators=(",", ":")).encode()
    return {"metadata": whole["metadata"], "spec": suspend, "status": status, "live": live}


def _without_managers(obj: Object) -> Object:
    metadata = {k: v for k, v in obj["metadata"].items() if k != "managedFields"}
    return {**obj, "metadata": metadata}


def _pod(obj: Object) -> Object:
    meta, status = obj["metadata"], obj.get("status") or {}
    kept = {key: meta[key] for key in _POD_METADATA if key in meta}
    labels = meta.get("labels") or {}
    kept["labels"] = {key: sys.intern(labels[key]) for key in _POD_LABELS if key in labels}
    spec = obj.get("spec") or {}
    node = spec.get("nodeName")
    ready = [c for c in status.get("conditions") or [] if c["type"] == "Ready"]
    return {
        "metadata": kept,
        "spec": ({"nodeName": sys.intern(node)} if node else {}) | {"gpus": _gpus(spec)},
        "status": {key: status[key] for key in ("phase", "podIP") if key in status}
        | {"conditions": [{"type": "Ready", "status": c["status"]} for c in ready]}
        | ({"failing": failures} if (failures := failing(status)) else {})
        | ({"unschedulable": why} if (why := unschedulable(status)) else {}),
    }


def _gpus(spec: Object) -> int:
    limits = ((c.get("resources") or {}).get("limits") or {} for c in spec.get("containers") or ())
    return sum(int(limit.get(GPU, 0)) for limit in limits)


def _node(obj: Object) -> Object:
    spec, status = obj.get("spec") or {}, obj.get("status") or {}
    return _without_managers(obj) | {
        "spec": {key: spec[key] for key in ("unschedulable", "taints") if key in spec},
        "status": {key: status[key] for key in ("conditions", "allocatable") if key in status},
    }
