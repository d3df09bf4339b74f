"""Fields of JSON that another release may have written."""

from collections.abc import Mapping
from functools import cache
from inspect import signature
from typing import Any


def known(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of ``data`` that ``kind``, a dataclass or named tuple, has fields for.

    What a newer release has added is left out. Raises TypeError if ``data`` is no mapping.
    """
    if not isinstance(data, Mapping):
        raise TypeError(f"{kind.__name__}: {data!r} is no object with fields")
    return {name: data[name] for name in _names(kind) if name in data}


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(signature(kind).parameters)
