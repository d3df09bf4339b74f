"""Findings and failures in words: field, value, remedy; the last line of a traceback."""

import re

from pydantic import ValidationError

_LONGEST = 500  # characters of one finding
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_EXCEPTION = re.compile(r"(?:^|\s)((?:[A-Za-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt))(?::|$)")
_VARIES = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{8,}\b|\d+")


def describe(error: ValidationError) -> str:
    """Every finding with the dotted path of its field and the value that was given."""
    findings = []
    for item in error.errors():
        where = ".".join(str(part) for part in ("spec", *item["loc"]))
        value = f" (got {item['input']!r})" if not isinstance(item["input"], dict) else ""
        findings.append(f"{where}: {item['msg'].removeprefix('Value error, ')}{value}"[:_LONGEST])
    return "; ".join(findings)


def last_error_line(text: str) -> str:
    """The last line of a log or a traceback that names an exception, from that name on; else the last line.

    Without colour codes, and at most 500 characters long.
    """
    lines = [line.strip() for line in _COLOURS.sub("", text).splitlines() if line.strip()]
    for line in reversed(lines):
        found = _EXCEPTION.search(line)
        if found:
            return line[found.start(1) :][:_LONGEST]
    return lines[-1][:_LONGEST] if lines else ""


def cause_of(message: str) -> str:
    """Reduce a message to what failures with the same cause share: its text without numbers and addresses."""
    return _VARIES.sub("#", message)
