"""Page of one kind: every field of its CRD, with type, default and description."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from grpo_devcluster.reference.markdown import table

_HEAD = ("field", "type", "default", "description")
Schema = dict[str, Any]


def crd_page(crd: Path) -> str:
    """Return the page of the kind that the file ``crd`` defines."""
    spec = yaml.safe_load(crd.read_text())["spec"]
    (version,) = spec["versions"]
    names, schema = spec["names"], version["schema"]["openAPIV3Schema"]
    short = ", ".join(names["shortNames"])
    parts = [
        f"# {names['kind']}\n\n",
        f"`apiVersion: {spec['group']}/{version['name']}`, `kind: {names['kind']}`; short name: `{short}`.\n",
        "Fields without a default are optional unless they are marked *required*. ",
        "`kubectl explain` shows the same texts.\n",
        _rules(schema, deep=False),
    ]
    for part in ("spec", "status"):
        parts += _sections(part, schema["properties"][part])
    return "".join(parts)


def _sections(part: str, schema: Schema) -> Iterator[str]:
    """Yield one section for the plain fields, and one for each field that has fields of its own."""
    properties = schema["properties"]
    nested = {name: field for name, field in properties.items() if _children(field)}
    plain = {name: field for name, field in properties.items() if name not in nested}
    yield f"\n## {part}\n\n" + table(_HEAD, _rows(plain, schema, ""))
    yield _rules(schema, deep=False)
    for name, field in nested.items():
        description = _sentence(field.get("description", ""))
        required = " *Required.*" if name in schema.get("required", ()) else ""
        yield f"\n## {part}.{name}\n\n{description}{required}\n\n" + table(_HEAD, _nested(field, ""))
        yield _rules(field)


def _nested(schema: Schema, prefix: str) -> Iterator[tuple[str, ...]]:
    """Yield a row for each field below ``schema``, depth first."""
    holder = schema.get("items", schema)
    for name, field in holder["properties"].items():
        yield from _rows({name: field}, holder, prefix)
        if _children(field):
            yield from _nested(field, f"{prefix}{name}{'[]' if 'items' in field else ''}.")


def _rows(fields: dict[str, Schema], holder: Schema, prefix: str) -> Iterator[tuple[str, ...]]:
    for name, field in fields.items():
        required = name in holder.get("required", ()) and "default" not in field
        default = field.get("default")
        shown = "*required*" if required else _default(default, field)
        yield f"`{prefix}{name}`", _type(field), shown, _sentence(field.get("description", ""))


def _children(field: Schema) -> bool:
    return "properties" in field.get("items", field)


def _default(value: Any, field: Schema) -> str:
    if value is None or _children(field):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _type(field: Schema) -> str:
    if field["type"] == "array":
        return f"list of {_type(field['items'])}"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if "additionalProperties" in field:
        return "map"
    return str(field["type"]) + _bounds(field)


def _bounds(field: Schema) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    below = "<" if field.get("exclusiveMaximum") else "≤"
    above = ">" if field.get("exclusiveMinimum") else "≥"
    if low is not None and high is not None and below == "≤" and above == "≥":
        return f" {low} to {high}"
    parts = [f" {above} {low}" if low is not None else "", f" {below} {high}" if high is not None else ""]
    return ",".join(filter(None, parts))


def _rules(schema: Schema, deep: bool = True) -> str:
    """Return the rules that the API server checks on this object, and with ``deep`` on those below it."""
    messages = list(dict.fromkeys(_messages(schema, deep)))
    if not messages:
        return ""
    return "\nRules:\n\n" + "".join(f"- {' '.join(message.split())}\n" for message in messages)


def _messages(schema: Schema, deep: bool) -> Iterator[str]:
    for rule in schema.get("x-kubernetes-validations", ()):
        yield rule["message"]
    if deep:
        for field in schema.get("properties", {}).values():
            yield from _messages(field.get("items", field), deep)


def _sentence(text: str) -> str:
    return text.strip().replace("\n", " ")
