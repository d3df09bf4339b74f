"""Rules of the tables: what becomes of an option."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Convert = Callable[[Any], Any]
OFF: tuple[Any, ...] = (None, False, "", 0, "null", "none", "None", [], {}, "disabled")


def same(value: Any) -> Any:
    """Return the value as it is."""
    return value


@dataclass(frozen=True, slots=True)
class Take:
    """The option is a field. ``convert`` raises ValueError with the remedy for a value that it lacks."""

    field: str
    convert: Convert = same


@dataclass(frozen=True, slots=True)
class Fact:
    """The option decides about fields together with others. ``about``: these fields, for the report.

    ``text``: a path or a name, of which a part may be unknown.
    """

    name: str
    about: str
    convert: Convert = same
    text: bool = False


@dataclass(frozen=True, slots=True)
class Always:
    """The job behaves as the option says, without a field. ``values``: those for which this holds."""

    how: str
    values: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class Missing:
    """The option has no counterpart, but the job trains the same. ``off``: values that ask for nothing."""

    instead: str
    off: tuple[Any, ...] = OFF


@dataclass(frozen=True, slots=True)
class Refused:
    """Without the option the job would train something else. ``off``: values that ask for nothing."""

    instead: str
    off: tuple[Any, ...] = OFF


Rule = Take | Fact | Always | Missing | Refused
Table = Mapping[str, Rule]


def rule_of(table: Table, name: str) -> Rule | None:
    """Return the rule of an option. A key that ends with * holds for all options that begin like it."""
    if name in table:
        return table[name]
    prefixes = [key for key in table if key.endswith("*") and name.startswith(key[:-1])]
    return table[max(prefixes, key=len)] if prefixes else None


def is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    """Return whether a value is among others; true and 1 differ."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)


def choice(**names: str) -> Convert:
    """Return a function that translates names. It raises ValueError for others."""

    def convert(value: Any) -> str:
        if str(value) not in names:
            known = ", ".join(dict.fromkeys(names))
            raise ValueError(f"no counterpart: use one of {known}")
        return names[str(value)]

    return convert


def integer(value: Any) -> int:
    """Return a whole number. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or int(value) != value:
        raise ValueError("write a whole number")
    return int(value)


def real(value: Any) -> float:
    """Return a number. Raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("write a number")
    return float(value)


def truth(value: Any) -> bool:
    """Return a truth value. Raises ValueError."""
    if str(value).lower() in ("true", "1"):
        return True
    if str(value).lower() in ("false", "0", "none", "null"):
        return False
    raise ValueError("write true or false")


def optional(convert: Convert) -> Convert:
    """Return a function that leaves None, for which no field is set."""
    return lambda value: None if value is None else convert(value)
