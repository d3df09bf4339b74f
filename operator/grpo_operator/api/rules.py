"""Validation rules of the API models, each checked by the API server (CEL) and by pydantic (Python).

Each model has its rules in one table above its class. The CRD generator writes the CEL side to the CRDs,
and `Model` checks the Python side. A unit test evaluates both sides on the same specs.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel
from pydantic.alias_generators import to_snake

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

    It has no Python side: only the API server knows the object before the update.
    """

    cel: str
    message: str


def _scalar(spec: BaseModel, path: str) -> str | None:
    """Return a field's value as YAML would show it; None for objects, lists and unset fields."""
    value: object = spec
    for part in path.split("."):
        value = getattr(value, to_snake(part), None)
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, str | int | float) else None
