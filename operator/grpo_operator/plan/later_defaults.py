"""Defaults of fields that only a newer release knows (pure).

Newer CRDs set them in every object. A new field's default means what a manifest without the field means
(docs/guides/upgrades.md), so an operator that does not know the field may leave such a value out.
"""

from copy import deepcopy
from typing import Any

from grpo_operator.api.base import Model
from grpo_operator.api.unknown_fields import Path, unknown_values


def without_later_defaults(spec: dict[str, Any], read: Model, served: dict[str, Any]) -> dict[str, Any]:
    """Return ``spec`` without the unknown fields that have their defaults.

    ``read``: the model made of it by ``of_any_release``. ``served``: schema of the spec that the API server
    has.
    """
    known = deepcopy(spec)
    for path, value in unknown_values(read):
        if _is_default(value, _at(served, path)):
            *parents, name = path
            inner: Any = known
            for part in parents:
                inner = inner[part]
            del inner[name]
    return known


def _is_default(value: Any, schema: dict[str, Any]) -> bool:
    return "default" in schema and _completed(value, schema) == _completed(schema["default"], schema)


def _at(schema: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the schema of the field at ``path``; empty when there is none."""
    for part in path:
        inner = schema.get("items") if isinstance(part, int) else (schema.get("properties") or {}).get(part)
        schema = inner or {}
    return schema


def _completed(value: Any, schema: dict[str, Any]) -> Any:
    """Return a value with the defaults of its fields, which the API server sets too."""
    if isinstance(value, dict):
        properties = schema.get("properties") or {}
        defaults = {name: field["default"] for name, field in properties.items() if "default" in field}
        return {
            name: _completed(inner, properties.get(name) or {}) for name, inner in (defaults | value).items()
        }
    if isinstance(value, list):
        return [_completed(item, schema.get("items") or {}) for item in value]
    return value
