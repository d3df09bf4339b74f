"""Types of numbers and truth values as the API server checks them; pydantic alone would convert texts."""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

_NAMES = {int: "an integer", float: "a number", bool: "true or false"}


def number_fields(model: type[BaseModel]) -> dict[str, type]:
    """Return int, float or bool for each field of such values, or of lists or objects of them.

    Fields have both of their names.
    """
    kinds = {name: _kind(field.annotation) for name, field in model.model_fields.items()}
    aliases = {name: field.alias or name for name, field in model.model_fields.items()}
    return {key: kind for name, kind in kinds.items() if kind for key in (name, aliases[name])}


def _kind(annotation: Any) -> type | None:
    if isinstance(annotation, type) and annotation in _NAMES:
        return annotation
    return next((kind for inner in get_args(annotation) if (kind := _kind(inner))), None)


def check_numbers(data: Mapping[str, Any], fields: Mapping[str, type]) -> None:
    """Refuse texts in place of numbers, and numbers in place of truth values or the other way round.

    ``fields``: those of ``number_fields``. Values of other types are left to pydantic. Raises
    ValidationError with an entry for each value.
    """
    errors: list[InitErrorDetails] = []
    for name, value in data.items():
        kind = fields.get(name)
        if kind is not None and type(value) is not kind:
            errors += (_error(where, found, kind) for where, found in _wrong(value, kind, (name,)))
    if errors:
        raise ValidationError.from_exception_data("numbers", errors)


def _wrong(
    value: Any, kind: type, where: tuple[str | int, ...]
) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    if isinstance(value, list | dict):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _wrong(item, kind, (*where, key))
    elif isinstance(value, str) or (
        isinstance(value, int | float) and isinstance(value, bool) != (kind is bool)
    ):
        yield where, value


def _error(where: tuple[str | int, ...], value: Any, kind: type) -> InitErrorDetails:
    problem = {"problem": f"must be {_NAMES[kind]}{_remedy(value, kind)}"}
    return InitErrorDetails(
        type=PydanticCustomError("json_type", "{problem}", problem), loc=where, input=value
    )


def _remedy(value: Any, kind: type) -> str:
    """Return what to change in a text that only its quotes make one."""
    if not isinstance(value, str):
        return ""
    meant = value in ("true", "false") if kind is bool else _is_number(value)
    return f", not a text: write {value} without quotes" if meant else ", not a text"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
