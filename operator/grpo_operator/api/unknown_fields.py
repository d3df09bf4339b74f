"""Fields that a newer release has written and this one does not know.

``Model.of_any_release`` keeps them, so that they can be named to users and are written again.
"""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel


def unknown_fields(model: BaseModel, root: str) -> list[str]:
    """Return the dotted paths of the unknown fields of ``model``, whose own path is ``root``."""
    return list(_paths(model, root))


def with_unknown(model: BaseModel, data: dict[str, Any]) -> dict[str, Any]:
    """Return the serialized ``model`` with its unknown fields, which pydantic leaves out."""
    _restore(model, data)
    return data


def _paths(value: object, path: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield from (f"{path}.{name}" for name in value.model_extra or ())
        for name, inner in value.__dict__.items():
            yield from _paths(inner, f"{path}.{_key(value, name)}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _paths(item, f"{path}[{index}]")


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
