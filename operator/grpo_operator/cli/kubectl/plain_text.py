"""Text of containers and users, which a terminal and rich must show and not obey (pure)."""

import re
from typing import Any

from rich.text import Text

# Escape sequences such as colors, control characters but for tabs and line ends, and halves of characters.
_UNPRINTABLE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")


def printable(value: Any) -> str:
    """Return a value as text without what would change the terminal."""
    return _UNPRINTABLE.sub("", str(value))


def plain(value: Any) -> Text:
    """Return a value as text that has no markup: messages quote logs, which have brackets of their own."""
    return Text(printable(value))
