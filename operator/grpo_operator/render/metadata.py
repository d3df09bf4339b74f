"""Metadata of every child (pure)."""

import hashlib
import json
from typing import Any

from grpo_operator.api import names


def metadata(
    owner: dict[str, Any],
    name: str,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Name, namespace, labels, annotations, and the GRPOJob or RolloutPool as owner."""
    result: dict[str, Any] = {
        "name": name,
        "namespace": owner["metadata"]["namespace"],
        "labels": names.owner_of(owner).label | (labels or {}),
        "ownerReferences": [names.owner_reference(owner)],
    }
    return result | ({"annotations": annotations} if annotations else {})


def with_hash(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with its own digest as an annotation, to skip needless writes."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:32]
    meta = manifest["metadata"]
    annotations = (meta.get("annotations") or {}) | {names.HASH_ANNOTATION: digest}
    return manifest | {"metadata": meta | {"annotations": annotations}}


def is_current(manifest: dict[str, Any], observed: dict[str, Any] | None, shared: bool = False) -> bool:
    """Did the observed object come from ``manifest`` (from with_hash), and has nobody changed it?

    The digest tells what is no longer wanted, the comparison what somebody else has changed, which
    users may do with a ``shared`` object.
    """
    if observed is None:
        return False
    annotations = observed["metadata"].get("annotations") or {}
    wanted = manifest["metadata"]["annotations"][names.HASH_ANNOTATION]
    same = bool(annotations.get(names.HASH_ANNOTATION) == wanted)
    return same and (shared or covers(observed, manifest))


def covers(observed: Any, wanted: Any) -> bool:
    """Does ``observed`` hold everything of ``wanted``? It may hold more: defaults, other people's labels."""
    if isinstance(wanted, dict):
        return isinstance(observed, dict) and all(
            key in observed and covers(observed[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(observed, list) and len(observed) == len(wanted) and all(map(covers, observed, wanted))
        )
    return bool(observed == wanted)
