"""Metadata of child objects, and detection of drift by a digest (pure)."""

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
    """Return metadata with the GRPOJob or RolloutPool as owner."""
    result: dict[str, Any] = {
        "name": name,
        "namespace": owner["metadata"]["namespace"],
        "labels": names.owner_of(owner).label | (labels or {}),
        "ownerReferences": [names.owner_reference(owner)],
    }
    return result | ({"annotations": annotations} if annotations else {})


def with_hash(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the manifest with its own digest as an annotation, to skip needless writes."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:32]
    meta = manifest["metadata"]
    annotations = (meta.get("annotations") or {}) | {names.HASH_ANNOTATION: digest}
    return manifest | {"metadata": meta | {"annotations": annotations}}


def is_child(existing: dict[str, Any], manifest: dict[str, Any]) -> bool:
    """Return whether an existing object has the owner of ``manifest``, by label or by owner reference.

    An object of an owner that was deleted, and of which another one has the name now, counts too.
    """
    owners = {reference["uid"] for reference in existing["metadata"].get("ownerReferences") or []}
    own = {reference["uid"] for reference in manifest["metadata"].get("ownerReferences") or []}
    return bool(owners & own) or names.owner_in_labels(existing) == names.owner_in_labels(manifest)


def is_current(manifest: dict[str, Any], observed: dict[str, Any] | None, shared: bool = False) -> bool:
    """Return whether the observed object was made from ``manifest`` (of with_hash) and is unchanged.

    The digest detects fields that are no longer rendered; the comparison detects changes by others. A
    ``shared`` object is not compared, because users may change it.
    """
    if observed is None:
        return False
    annotations = observed["metadata"].get("annotations") or {}
    digest = manifest["metadata"]["annotations"][names.HASH_ANNOTATION]
    same = bool(annotations.get(names.HASH_ANNOTATION) == digest)
    return same and (shared or covers(observed, manifest))


def covers(observed: Any, desired: Any) -> bool:
    """Return whether ``observed`` has all values of ``desired``; it may have more keys, such as defaults."""
    if isinstance(desired, dict):
        return isinstance(observed, dict) and all(
            key in observed and covers(observed[key], value) for key, value in desired.items()
        )
    if isinstance(desired, list):
        return (
            isinstance(observed, list)
            and len(observed) == len(desired)
            and all(map(covers, observed, desired))
        )
    return bool(observed == desired)
