"""Body of a server-side apply, which the API server reads as YAML."""

import json
import re
from typing import Any

# JSON writes characters beyond U+FFFF as two escapes, which YAML refuses: these are sent as they are. The
# others are escaped, because YAML takes some of them for line breaks and refuses control characters.
_ESCAPED = re.compile("[^\x00-\x7e\U00010000-\U0010ffff]")
_REPLACEMENT = "\ufffd"


def apply_body(manifest: dict[str, Any]) -> str:
    """Return JSON that is YAML with the same meaning. Halves of a character become U+FFFD.

    Output of containers, which messages quote, may have any character.
    """
    return _ESCAPED.sub(_escape, json.dumps(manifest, ensure_ascii=False))


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return _REPLACEMENT if 0xD800 <= code <= 0xDFFF else f"\\u{code:04x}"
