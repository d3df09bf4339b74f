"""Figures in README and docs: ``VALUE<!-- FILE.KEY -->`` quotes a figure of benchmarks/results/FILE.json.

VALUE may have thousands separators, an exponent and a unit. It must equal the file's value at the rounding
shown. KEY is a key of the file's ``figures``, or a path of keys and list indices, separated by dots, from
``figures`` or from the top of the file. The comment follows the number, or its unit.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Units with a scale, beside which the file's value has none; other units are those of the file.
_SCALES = {"ms": 1e-3, "thousand": 1e3, "million": 1e6, "billion": 1e9, "B": 1e9}
_NUMBER = r"(?:\d{1,3}(?:[,  ]\d{3})+|\d+)(?:\.\d+)?(?:e[+-]?\d+)?"
_UNIT = r"[ ]?(?:[%\u00d7]|times|percent|[A-Za-zµ]+(?:/[A-Za-z]+)?)?"
_KEYED = re.compile(rf"(?:(?P<number>{_NUMBER})(?P<unit>{_UNIT})[`*_]*)?\s?<!--\s*(?P<key>\w+\.[^>]+?)\s*-->")


@dataclass(frozen=True, slots=True)
class Quoted:
    """A figure of a page."""

    number: str
    unit: str
    file: str
    key: str


def quoted(page: str) -> list[Quoted]:
    """Return the figures of a page. Raises AssertionError for a key that follows no number."""
    found = []
    for match in _KEYED.finditer(page):
        file, _, key = match["key"].partition(".")
        assert match["number"], f"<!-- {match['key']} --> must follow a number"
        found.append(Quoted(match["number"], match["unit"].strip(), file, key))
    return found


def value_of(results: Path, figure: Quoted) -> float:
    """Return the file's value. Raises AssertionError for an unknown file or key."""
    path = results / f"{figure.file}.json"
    assert path.is_file(), f"{figure.file}.{figure.key}: there is no {path.name}"
    content = json.loads(path.read_text())
    for start in (content.get("figures", {}), content):
        value = _walk(start, figure.key)
        if isinstance(value, int | float):
            return float(value)
    raise AssertionError(f"{figure.file}.{figure.key}: {path.name} has no such figure")


def _walk(content: Any, key: str) -> Any:
    if isinstance(content, dict) and key in content:
        return content[key]
    head, _, rest = key.partition(".")
    if isinstance(content, dict):
        # A key may contain dots or slashes itself: try the longest one first.
        for name in sorted(content, key=len, reverse=True):
            if key.startswith(f"{name}."):
                return _walk(content[name], key[len(name) + 1 :])
    if isinstance(content, list) and head.isdigit() and int(head) < len(content):
        return _walk(content[int(head)], rest) if rest else content[int(head)]
    return None


def check(results: Path, figure: Quoted) -> None:
    """Raise AssertionError unless the page shows the file's value, rounded."""
    value = value_of(results, figure)
    if figure.unit in ("%", "percent") and "pct" not in figure.key:
        value *= 100
    value /= _SCALES.get(figure.unit, 1)
    digits, _, exponent = re.sub(r"[,  ]", "", figure.number).partition("e")
    last = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    shown = float(digits) * 10.0 ** int(exponent or 0)
    assert abs(value - shown) <= last / 2 * (1 + 1e-9), (
        f"{figure.file}.{figure.key} is {value:g}, the page shows {figure.number} {figure.unit}".rstrip()
    )
