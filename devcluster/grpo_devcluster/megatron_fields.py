"""Table of Megatron-Core's configuration fields: ``python -m grpo_devcluster.megatron_fields FILE``.

The operator checks ``spec.trainer.megatron`` against it, because it has no Megatron-Core to ask.
"""

import json
import sys
from dataclasses import fields
from pathlib import Path
from types import GenericAlias, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

# Types whose values a manifest can hold, under the names that the table has for them.
_WRITABLE: dict[Any, str] = {
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    list[int]: "list[int]",
    list[float]: "list[float]",
    list[str]: "list[str]",
}


def table() -> dict[str, Any]:
    """Return the version of the installed Megatron-Core and the fields of its configuration.

    A field has ``types``, empty if it takes only Python objects, and ``choices`` if its values are listed.
    """
    from grpo_worker.megatron.cpu import platform

    platform.install()  # before Megatron-Core is imported
    import megatron.core
    from megatron.core.transformer import MLATransformerConfig

    # It extends TransformerConfig, so it has the fields of both.
    hints = get_type_hints(MLATransformerConfig)
    names = sorted(field.name for field in fields(MLATransformerConfig) if field.init)
    return {
        "version": megatron.core.__version__,
        "fields": {name: describe(hints[name]) for name in names},
    }


def describe(hint: Any) -> dict[str, list[str]]:
    """Return the entry of a field with this type hint."""
    options = _options(hint)
    choices = [value for option in options if get_origin(option) is Literal for value in get_args(option)]
    allowed = [*map(_plain, options), *map(type, choices)]
    types = [name for plain, name in _WRITABLE.items() if plain in allowed]
    return {"types": types} | ({"choices": choices} if choices else {})


def _options(hint: Any) -> list[Any]:
    """Return the members of a union, without None: a manifest leaves the field out instead."""
    if get_origin(hint) not in (Union, UnionType):
        return [hint]
    return [option for option in get_args(hint) if option is not NoneType]


def _plain(option: Any) -> Any:
    """Return ``list[X]`` for typing's ``List[X]``, and every other type as it is."""
    return GenericAlias(list, get_args(option)) if get_origin(option) is list else option


def render(content: dict[str, Any]) -> str:
    """Return the table as JSON with one line for each field, so that a diff of versions shows the fields."""
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in content["fields"].items()]
    body = ",\n".join(lines)
    return f'{{\n "version": {json.dumps(content["version"])},\n "fields": {{\n{body}\n }}\n}}\n'


def main() -> None:
    """Write the table to the file given as the only argument."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m grpo_devcluster.megatron_fields FILE")
    Path(sys.argv[1]).write_text(render(table()))


if __name__ == "__main__":
    main()
