"""pydantic's findings in words: field, value, remedy."""

from pydantic import ValidationError

_LONGEST = 500  # characters of one finding


def describe(error: ValidationError) -> str:
    """Every finding with the dotted path of its field and the value that was given."""
    findings = []
    for item in error.errors():
        where = ".".join(str(part) for part in ("spec", *item["loc"]))
        value = f" (got {item['input']!r})" if not isinstance(item["input"], dict) else ""
        findings.append(f"{where}: {item['msg'].removeprefix('Value error, ')}{value}"[:_LONGEST])
    return "; ".join(findings)
