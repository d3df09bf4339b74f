"""Validation rules of the API models, each checked by the API server (CEL) and by pydantic (Python).

Each model has its rules in one table above its class. The CRD generator writes the CEL side to the CRDs,
and `Model` checks the Python side. A unit test evaluates both sides on the same specs.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel
from pydantic.alias_generators import to_snake
from pydantic.fields import FieldInfo

SpecType = TypeVar("SpecType", bound=BaseModel)
# A field that a CEL expression reads; "(" marks a method call, whose name is no field.
_FIELD = re.compile(r"\bself\.([\w.]+)(\(?)")


@dataclass(frozen=True, slots=True)
class Rule(Generic[SpecType]):
    """One condition on a model, written for both sides.

    ``cel``: expression over ``self``, with the field names of the manifest.
    ``message``: the fields at fault and the remedy.
    ``holds``: the same condition on the pydantic model; it must not raise for any model whose fields
    are valid one by one, because every rule is checked even when another one is violated.
    """

    cel: str
    message: str
    holds: Callable[[SpecType], bool]

    def error(self, spec: SpecType) -> str:
        """Return the message, followed by the values of the fields that the rule reads."""
        fields = dict.fromkeys(
            path.rpartition(".")[0] if call else path for path, call in _FIELD.findall(self.cel)
        )
        given = [f"{path}: {text}" for path in fields if (text := _scalar(spec, path)) is not None]
        return f"{self.message} (got {', '.join(given)})" if given else self.message


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """A condition on an update, over ``self`` and ``oldSelf``.

    It has no Python side: only the API server knows the object before the update. ``field``: path of the
    field at fault, where it is not the one that the rule belongs to.
    """

    cel: str
    message: str
    field: str = ""

    def validation(self) -> dict[str, str]:
        """Return the entry of x-kubernetes-validations."""
        return {"rule": self.cel, "message": self.message} | ({"fieldPath": self.field} if self.field else {})


def unchanged(model: type[BaseModel], path: str, names: Iterable[str]) -> str:
    """Return the CEL expression that the fields ``names`` of the object at ``path`` stay as they are."""
    fields = ((name, model.model_fields[name]) for name in names)
    return " && ".join(_unchanged(f"{path}.{field.alias or name}", field) for name, field in fields)


def _unchanged(path: str, field: FieldInfo) -> str:
    old, new = f"oldSelf.{path}", f"self.{path}"
    same = f"{old} == {new}"
    return same if _always_there(field) else f"has({old}) == has({new}) && (!has({new}) || {same})"


def _always_there(field: FieldInfo) -> bool:
    """Return whether the API server refuses objects without the field, or sets its default."""
    if field.default_factory is not None:
        return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    return field.is_required() or field.default is not None


def _scalar(spec: BaseModel, path: str) -> str | None:
    """Return a field's value as YAML would show it; None for objects, lists and unset fields."""
    value: object = spec
    for part in path.split("."):
        value = getattr(value, to_snake(part), None)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int | float) else None
