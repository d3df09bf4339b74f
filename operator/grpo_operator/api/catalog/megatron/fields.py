"""Check of the fields of Megatron-Core's configuration that a job passes through.

``fields.json`` is generated from the configuration class of the Megatron-Core that the trainer image has
(``make megatron-fields``).
"""

import json
import math
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from grpo_operator.api.catalog.megatron.owned import OWNED

_TABLE: dict[str, Any] = json.loads(Path(__file__).with_name("fields.json").read_text())
VERSION: str = _TABLE["version"]
FIELDS: dict[str, dict[str, list[str]]] = _TABLE["fields"]
# Fields that a job may set.
OPEN = tuple(name for name, field in FIELDS.items() if name not in OWNED and field["types"])


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _list_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_item, value))


# Name of a type in the table -> (what an error calls it, whether a value has it).
_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "int": ("an integer", _is_int),
    "float": ("a number", _is_number),
    "str": ("a string", _is_text),
    "list[int]": ("a list of integers", _list_of(_is_int)),
    "list[float]": ("a list of numbers", _list_of(_is_number)),
    "list[str]": ("a list of strings", _list_of(_is_text)),
}


def as_number(name: str, value: Any) -> Any:
    """Return the number that a string like ``1e-3`` writes, where the field takes one, or the value as it is.

    Kubernetes reads ``1e-3`` in a manifest as a number, PyYAML as a string.
    """
    if not isinstance(value, str) or FIELDS.get(name, {}).get("types") != ["float"]:
        return value
    try:
        return float(value)
    except ValueError:
        return value


def problem(name: str, value: Any) -> str | None:
    """Return why a job cannot pass this value of a field to Megatron-Core, and the remedy, or None."""
    if name not in FIELDS:
        return f"Megatron-Core {VERSION} has no such field{_hint(name)}"
    if name in OWNED:
        return OWNED[name]
    field = FIELDS[name]
    if not field["types"]:
        return "the field takes a Python object, which a manifest cannot hold: remove it"
    if not any(_TYPES[kind][1](value) for kind in field["types"]):
        return f"must be {_expected(field)}"
    if field.get("choices") and value not in field["choices"]:
        return f"must be {_expected(field)}"
    return None


def _hint(name: str) -> str:
    near = get_close_matches(name, OPEN, 1) or get_close_matches(name, FIELDS, 1)
    return f"; did you mean {near[0]}?" if near else ": remove it"


def _expected(field: dict[str, list[str]]) -> str:
    if choices := field.get("choices"):
        return "one of " + ", ".join(choices)
    return " or ".join(_TYPES[kind][0] for kind in field["types"])
