"""What the installed KubeRay can do (pure), by the fields of its RayCluster.

1.5.1 brought ``authOptions``, 1.6 ``upgradeStrategy``. The API server refuses fields that it does
not know, so they are looked for before anything is applied.
"""

from collections.abc import Set


def shortcoming(fields: Set[str], upgrade_strategy: str) -> tuple[str, str] | None:
    """(reason, message) why nothing can be applied yet; None when all is there."""
    if not fields:
        return (
            "KubeRayMissing",
            "the API server knows no RayCluster of ray.io/v1: install KubeRay 1.5.1 or newer",
        )
    if "authOptions" not in fields:
        return (
            "KubeRayTooOld",
            "the installed KubeRay has no spec.authOptions: install KubeRay 1.5.1 or newer, CRDs included; "
            "pods start then",
        )
    if upgrade_strategy != "None" and "upgradeStrategy" not in fields:
        return (
            "KubeRayTooOld",
            f"spec.upgradeStrategy={upgrade_strategy} needs KubeRay 1.6, CRDs included: install it, or set "
            "upgradeStrategy to None",
        )
    return None
