"""The HTML file of a page (pure): one file without references, which runs no script but its own."""

import base64
import hashlib
import html
import json
from functools import cache
from importlib.resources import files
from typing import Any

_SCRIPTS = ("charts.js", "curves.js", "validation.js", "samples.js", "page.js")
# In JSON these can stand in strings only; escaped, no text can end the element that it is in.
_ESCAPED = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def embedded(data: Any) -> str:
    """Return JSON that may stand in a script element. Raises ValueError for numbers that are not finite."""
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).translate(_ESCAPED)


def policy(live: bool) -> str:
    """Return the Content-Security-Policy: the page's own script and style, and requests to its own server.

    ``live``: whether the page asks a controller; otherwise it may ask nobody.
    """
    asks = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src '{_digest(_script())}'; style-src '{_digest(_style())}'; "
        f"connect-src {asks}; base-uri 'none'; form-action 'none'"
    )


def page(data: dict[str, Any], live: bool) -> str:
    """Return the HTML of a page with its data."""
    parts = {
        "policy": html.escape(policy(live)),
        "title": html.escape(f"{data['job']}: GRPO run"),
        "style": _style(),
        "data": embedded(data | {"live": live}),
        "script": _script(),
    }
    # In one pass: what a part contains is not looked at.
    pieces = _text("page.html").split("%%")
    text = "".join(parts[piece] if at % 2 else piece for at, piece in enumerate(pieces))
    return text.encode("utf-8", "replace").decode()  # halves of characters have no bytes


@cache
def _script() -> str:
    return "\n".join(_text(name) for name in _SCRIPTS)


@cache
def _style() -> str:
    return _text("page.css")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _text(name: str) -> str:
    return (files("grpo_worker.run_page") / "static" / name).read_text(encoding="utf-8")
