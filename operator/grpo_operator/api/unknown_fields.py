"""Fields that a newer release has written and this one does not know.

``Model.of_any_release`` keeps them, so that they can be named to users and are written again.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

Path = tuple[str | int, ...]  # names of fields and indexes of lists, from the model's root


def unknown_values(model: BaseModel) -> Iterator[tuple[Path, Any]]:
    """Yield the paths and values of the unknown fields of ``model``."""
    return _values(model, ())


def unknown_fields(model: BaseModel, root: str) -> list[str]:
    """Return the dotted paths of the unknown fields of ``model``, whose own path is ``root``."""
    return [root + "".join(map(_dotted, path)) for path, _ in unknown_values(model)]


def with_unknown(model: BaseModel, data: dict[str, Any]) -> dict[str, Any]:
    """Return the serialized ``model`` with its unknown fields, which pydantic leaves out."""
    _restore(model, data)
    return data


def _values(value: object, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, BaseModel):
        yield from (((*path, name), extra) for name, extra in (value.model_extra or {}).items())
        for name, inner in value.__dict__.items():
            yield from _values(inner, (*path, _key(value, name)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _values(item, (*path, index))


def _dotted(part: str | int) -> str:
    return f"[{part}]" if isinstance(part, int) else f".{part}"


def _restore(value: object, data: Any) -> None:
    if isinstance(value, BaseModel):
        data |= value.model_extra or {}
        for name, inner in value.__dict__.items():
            if isinstance(inner, BaseModel | list | tuple):
                _restore(inner, data[_key(value, name)])
    elif isinstance(value, list | tuple) and value and isinstance(value[0], BaseModel):
        for item, written in zip(value, data, strict=True):
            _restore(item, written)


def _key(model: BaseModel, name: str) -> str:
    return type(model).model_fields[name].alias or name
