"""Extraction of code blocks between lines of three backticks."""

import re
from collections.abc import Collection

_BLOCK = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)


def last_block(text: str, languages: Collection[str]) -> str | None:
    """Return the last block in one of the languages, else the last block, else None."""
    blocks = _BLOCK.findall(text)
    named = [body for language, body in blocks if language.lower() in languages]
    bodies = named or [body for _, body in blocks]
    return bodies[-1] if bodies else None
