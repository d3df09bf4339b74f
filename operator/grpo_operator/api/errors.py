"""Text of validation errors and of failures in logs."""

import re

from pydantic import ValidationError

_LONGEST = 500  # characters of one error
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_EXCEPTION = re.compile(r"(?:^|\s)((?:[A-Za-z_][\w]*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt))(?::|$)")
_VARIES = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{8,}\b|\d+")


def describe(error: ValidationError, root: str = "spec") -> str:
    """Return all errors as one line, each with the dotted path below ``root`` and the value of its field."""
    messages = []
    for item in error.errors():
        where = ".".join(str(part) for part in (root, *item["loc"]))
        value = f" (got {item['input']!r})" if not isinstance(item["input"], dict) else ""
        messages.append(f"{where}: {item['msg'].removeprefix('Value error, ')}{value}"[:_LONGEST])
    return "; ".join(messages)


def last_error_line(text: str) -> str:
    """Return the last line of a log or traceback that names an exception, starting at that name.

    If no line names one, return the last line. The result has no colour codes and at most 500 characters.
    """
    lines = [line.strip() for line in _COLOURS.sub("", text).splitlines() if line.strip()]
    for line in reversed(lines):
        if match := _EXCEPTION.search(line):
            return line[match.start(1) :][:_LONGEST]
    return lines[-1][:_LONGEST] if lines else ""


def cause_of(message: str) -> str:
    """Return a message without numbers and addresses, which is equal for failures with the same cause."""
    return _VARIES.sub("#", message)
