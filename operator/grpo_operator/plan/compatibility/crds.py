"""Does the cluster's CRD know every field of this operator (pure)?

``helm upgrade`` leaves CRDs alone, so an operator may meet an older one, which would drop fields
of specs without a word and refuse statuses.
"""

from collections.abc import Iterator
from typing import Any

_REMEDY = "apply the crds/ of this release with kubectl apply --server-side; new jobs start then"


def lacking(kind: str, served: dict[str, Any], wanted: dict[str, Any]) -> str:
    """What to say when the served schema lacks fields of the wanted one; "" when it has them all."""
    missing = list(_missing(served, wanted, ""))
    if not missing:
        return ""
    some = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
    return f"the {kind} CRD in this cluster is older than the operator and lacks {some}: {_REMEDY}"


def _missing(served: dict[str, Any], wanted: dict[str, Any], path: str) -> Iterator[str]:
    known = served.get("properties") or {}
    for name, schema in (wanted.get("properties") or {}).items():
        here = f"{path}.{name}" if path else name
        if name not in known:
            yield here
        else:
            yield from _missing(known[name], schema, here)
    if "items" in wanted:
        yield from _missing(served.get("items") or {}, wanted["items"], f"{path}[]")
