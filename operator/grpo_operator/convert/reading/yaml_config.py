"""Options of a YAML configuration: nested keys become dotted names, interpolations become values."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from grpo_operator.convert.errors import ConvertError
from grpo_operator.convert.reading.source import Option, number, parsed

_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_DEPTH = 20  # of interpolations within interpolations


def documents(texts: Sequence[str]) -> dict[str, Any]:
    """Return one mapping of several configurations, of which each replaces values of those before it.

    Raises ConvertError.
    """
    merged: dict[str, Any] = {}
    for text in texts:
        try:
            content = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConvertError(f"the configuration is not valid YAML: {error}") from error
        if not isinstance(content, dict):
            raise ConvertError("the configuration is no YAML mapping: see grpo-convert --help")
        merged = _merged(merged, content)
    return merged


def parents(text: str) -> list[str]:
    """Return the files that a NeMo-RL configuration inherits from, relative to its own folder."""
    content = documents([text]).get("defaults", [])
    given = content if isinstance(content, list) else [content]
    return [each for each in given if isinstance(each, str) and each.endswith((".yaml", ".yml"))]


def flat_options(content: Mapping[str, Any], given: Mapping[str, str]) -> list[Option]:
    """Return the options. ``given``: values of variables that the configuration reads elsewhere."""
    flat = dict(_flat(content, ""))
    return [_option(name, value, flat, given) for name, value in flat.items() if not _is_internal(name)]


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for name, value in above.items():
        inner = result.get(name)
        if isinstance(value, dict) and isinstance(inner, dict):
            result[name] = _merged(inner, value)
        else:
            result[name] = value
    return result


def _flat(content: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in content.items():
        inner = isinstance(value, dict) and value
        found += _flat(value, f"{prefix}{name}.") if inner else [(f"{prefix}{name}", value)]
    return found


def _is_internal(name: str) -> bool:
    return (
        name == "defaults"
        or name.rsplit(".", 1)[-1] == "_target_"
        or name.startswith(("hydra.", "defaults."))
    )


def _option(name: str, value: Any, flat: Mapping[str, Any], given: Mapping[str, str]) -> Option:
    resolved, unknown = _resolved(name, value, flat, given)
    return Option(name, number(resolved), _written(resolved), unknown)


def _written(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _resolved(
    name: str, value: Any, flat: Mapping[str, Any], given: Mapping[str, str]
) -> tuple[Any, str | None]:
    """Return a value without interpolations, and why one is left."""
    for _ in range(_DEPTH):
        match = _INNERMOST.search(value) if isinstance(value, str) else None
        if match is None:
            return value, None
        found, known = _value_of(name, match[1], flat, given)
        if not known:
            return value, f"{name}: {match[0]} is not in the configuration: add --define {match[1]}=VALUE"
        value = found if match[0] == value else value.replace(match[0], str(found))
    return value, f"{name}: interpolations refer to each other"


def _value_of(
    name: str, expression: str, flat: Mapping[str, Any], given: Mapping[str, str]
) -> tuple[Any, bool]:
    """Return the value of an interpolation, and whether it is known."""
    if expression in given:
        return parsed(given[expression]), True
    function, _, rest = expression.rpartition(":")
    if function == "mul":
        factors = [parsed(factor.strip()) for factor in rest.split(",")]
        known = len(factors) == 2 and all(isinstance(factor, int | float) for factor in factors)
        return (factors[0] * factors[1], True) if known else (None, False)
    target, _, default = rest.partition(",")
    target = _absolute(name, target.strip())
    if target in flat:
        return flat[target], True
    if function in ("oc.select", "oc.env") and default:
        return parsed(default.strip().strip("'\"")), True
    return None, False


def _absolute(name: str, target: str) -> str:
    """Return the full name of a target; leading dots count from the option's own mapping."""
    dots = len(target) - len(target.lstrip("."))
    if not dots:
        return target
    base = name.split(".")[:-dots]
    return ".".join([*base, target.lstrip(".")])
