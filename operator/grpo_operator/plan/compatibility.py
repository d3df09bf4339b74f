"""Checks whether the installed KubeRay and the installed CRDs fit this operator (pure)."""

from collections.abc import Iterator, Set
from typing import Any

_CRD_REMEDY = "apply the crds/ of this release with kubectl apply --server-side; new jobs wait until then"
_MAX_FIELDS = 5  # missing fields named in one message


def kuberay_problem(fields: Set[str], upgrade_strategy: str) -> tuple[str, str] | None:
    """Return (reason, message) when the installed KubeRay cannot run the job or pool, else None.

    ``fields``: fields of ``RayCluster.spec`` that the API server knows; empty without KubeRay. KubeRay 1.5.1
    added ``authOptions``, 1.6 ``upgradeStrategy``. The API server refuses unknown fields, so they are checked
    before anything is applied.
    """
    if not fields:
        return (
            "KubeRayMissing",
            "the API server does not serve RayCluster of ray.io/v1: install KubeRay 1.5.1 or newer",
        )
    if "authOptions" not in fields:
        return (
            "KubeRayTooOld",
            "the installed KubeRay has no spec.authOptions: install KubeRay 1.5.1 or newer, CRDs included; "
            "pods start afterwards",
        )
    if upgrade_strategy != "None" and "upgradeStrategy" not in fields:
        return (
            "KubeRayTooOld",
            f"spec.upgradeStrategy={upgrade_strategy} needs KubeRay 1.6, CRDs included: install it, or set "
            "upgradeStrategy to None",
        )
    return None


def crd_problem(kind: str, served: dict[str, Any], needed: dict[str, Any]) -> str:
    """Return a message when the served schema lacks fields of the needed one, else "".

    ``helm upgrade`` does not upgrade CRDs, so the cluster may have older ones. The API server would then drop
    new fields of specs silently and refuse statuses with new fields.
    """
    missing = list(_missing(served, needed, ""))
    if not missing:
        return ""
    some = ", ".join(missing[:_MAX_FIELDS])
    if len(missing) > _MAX_FIELDS:
        some += f" and {len(missing) - _MAX_FIELDS} more"
    return f"the {kind} CRD in this cluster is older than the operator and lacks {some}: {_CRD_REMEDY}"


def declared(data: Any, schema: dict[str, Any]) -> Any:
    """Return the part of an object that a served schema declares: the API server applies no other."""
    if isinstance(data, dict) and "properties" in schema:
        known = schema["properties"]
        return {name: declared(value, known[name]) for name, value in data.items() if name in known}
    if isinstance(data, list) and "items" in schema:
        return [declared(item, schema["items"]) for item in data]
    return data


def _missing(served: dict[str, Any], needed: dict[str, Any], path: str) -> Iterator[str]:
    known = served.get("properties") or {}
    for name, schema in (needed.get("properties") or {}).items():
        here = f"{path}.{name}" if path else name
        if name not in known:
            yield here
        else:
            yield from _missing(known[name], schema, here)
    if "items" in needed:
        yield from _missing(served.get("items") or {}, needed["items"], f"{path}[]")
