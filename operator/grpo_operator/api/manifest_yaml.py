"""YAML as kubectl reads it: ``1e-6`` is a number, which PyYAML would take and write for a text."""

import re
from collections.abc import Iterator
from typing import Any

import yaml

_FLOAT = "tag:yaml.org,2002:float"
_WITH_EXPONENT = re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$")


class _Loader(yaml.SafeLoader):
    """PyYAML's loader with the numbers of YAML 1.2."""


class _Dumper(yaml.SafeDumper):
    """PyYAML's dumper, with quotes around texts that YAML 1.2 takes for numbers."""


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    """Return the number of a float's node; 2.0 is the integer 2, as it is in the JSON that kubectl sends."""
    value = float(loader.construct_yaml_float(node))
    return int(value) if value.is_integer() else value


for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver(_FLOAT, _WITH_EXPONENT, list("-+.0123456789"))
_Loader.add_constructor(_FLOAT, _number)


def load(text: str) -> Any:
    """Return the one document in ``text``. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)  # noqa: S506 - it derives from SafeLoader


def load_all(text: str) -> Iterator[Any]:
    """Yield the documents in ``text``. Raises yaml.YAMLError."""
    return iter(yaml.load_all(text, _Loader))


def dump(value: Any) -> str:
    """Return ``value`` as a document, with keys in their order."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False))
