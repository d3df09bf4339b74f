"""Metadata of every child (pure)."""

import hashlib
import json
from typing import Any

from grpo_operator.plan import names


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


def is_current(manifest: dict[str, Any], observed: dict[str, Any] | None) -> bool:
    """Does the observed object carry the digest of ``manifest`` (from with_hash)?"""
    if observed is None:
        return False
    annotations = observed["metadata"].get("annotations") or {}
    wanted = manifest["metadata"]["annotations"][names.HASH_ANNOTATION]
    return bool(annotations.get(names.HASH_ANNOTATION) == wanted)
