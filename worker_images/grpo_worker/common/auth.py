"""Authentication of HTTP calls by a key that the pods of a namespace share.

The key protects the routes that move weights or control a job. The operator creates the key and mounts it as
a file, which is read for every call, so that a replaced key takes effect.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

FILE = (
    "GRPO_KEY_FILE"  # variable with the path of the key; if it is unset (outside of pods), no key is needed
)
# Routes without authentication, for probes, Prometheus and users.
OPEN = frozenset(
    {"/healthz", "/readyz", "/enginez", "/turnz", "/hostz", "/metrics", "/v1/status", "/v1/gpus"}
)
_SCHEME = "Bearer "


def headers() -> dict[str, str]:
    """Return the HTTP headers of a caller; empty if no key is configured."""
    key = _key()
    return {"authorization": _SCHEME + key} if key else {}


def guarded(routes: Sequence[BaseRoute]) -> Starlette:
    """Return an application that answers 401 to callers without the key, except on ``OPEN`` routes."""
    return Starlette(routes=routes, middleware=[Middleware(_Guard)])


def signature(purpose: bytes, content: Any) -> str:
    """Return what only a holder of the key can compute for some JSON; a plain digest if no key is configured.

    ``purpose``: at most 16 bytes. A signature for one purpose is none for another. Raises PermissionError
    when the key cannot be read.
    """
    key = _key()
    if key == "":
        raise PermissionError(f"the key of this namespace's pods in {os.environ[FILE]} cannot be read")
    derived = hashlib.blake2b(key.encode(), digest_size=32, person=purpose).digest() if key else b""
    text = json.dumps(content, sort_keys=True).encode()
    return hashlib.blake2b(text, key=derived, digest_size=32, person=purpose).hexdigest()


def is_signed(purpose: bytes, content: Any, by: str) -> bool:
    """Return whether ``by`` is the content's signature."""
    return hmac.compare_digest(signature(purpose, content).encode(), by.encode())


class _Guard:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or _admits(Headers(scope=scope)):
            await self._app(scope, receive, send)
        else:
            refusal = JSONResponse({"error": "the key of this namespace's pods is needed"}, 401)
            await refusal(scope, receive, send)


def _admits(sent: Headers) -> bool:
    key = _key()
    if key is None:
        return True
    # If the key cannot be read, every caller is refused.
    credentials = sent.get("authorization", "")
    return bool(key) and hmac.compare_digest(credentials.encode(), (_SCHEME + key).encode())


def _key() -> str | None:
    """Return the key; "" when it cannot be read, None when none is configured."""
    file = os.environ.get(FILE)
    if file is None:
        return None
    try:
        return Path(file).read_text().strip()
    except OSError:
        return ""
