"""Options of a configuration, in a form that the frameworks share."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import yaml


class Framework(StrEnum):
    """Framework whose configurations can be converted."""

    VERL = "verl"
    SLIME = "slime"
    NEMO_RL = "nemo-rl"


@dataclass(frozen=True, slots=True)
class Option:
    """An option with its value. ``written``: the value as the source has it.

    ``unknown``: why a part of the value is not known, with line and name; None where all of it is.
    """

    name: str
    value: Any
    written: str
    unknown: str | None = None

    def __str__(self) -> str:
        return f"{self.name}={self.written}"


@dataclass(frozen=True, slots=True)
class Source:
    """A configuration. ``notes``: what was not read of it, and why."""

    framework: Framework
    options: tuple[Option, ...]
    notes: tuple[str, ...] = field(default=())

    def get(self, name: str) -> Option | None:
        """Return an option by its name, or None."""
        return next((option for option in self.options if option.name == name), None)


def last_of_each(options: Iterable[Option]) -> tuple[Option, ...]:
    """Return the options without those that a later one of the same name replaces."""
    return tuple({option.name: option for option in options}.values())


def parsed(text: str) -> Any:
    """Return the value that hydra reads from an override: a number, a truth value, null, a list or text."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = _listed(text)
    return number(value)


def number(value: Any) -> Any:
    """Return numbers that YAML 1.1 takes for text, such as 1e-6, as numbers, at every level."""
    if isinstance(value, list):
        return [number(each) for each in value]
    if isinstance(value, str) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", value):
        return float(value)
    return value


def _listed(text: str) -> Any:
    if text.startswith("[") and text.endswith("]"):
        return [each.strip().strip("'\"") for each in text[1:-1].split(",")]
    return text
