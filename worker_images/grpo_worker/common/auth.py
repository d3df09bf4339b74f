"""The key that the pods of a namespace share: without it nobody moves weights or controls a job.

The operator makes it and mounts it. The file is read for every call, so a key that is replaced is followed.
"""

import hmac
import os
from collections.abc import Sequence
from pathlib import Path

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

FILE = "GRPO_KEY_FILE"  # variable with the key's file; without it, outside of pods, nothing is asked for
# For probes, Prometheus, and people.
OPEN = frozenset({"/healthz", "/readyz", "/enginez", "/turnz", "/metrics", "/v1/status"})
_SCHEME = "Bearer "


def headers() -> dict[str, str]:
    """What a caller sends along; empty where there is no key."""
    key = _key()
    return {"authorization": _SCHEME + key} if key else {}


def guarded(routes: Sequence[BaseRoute]) -> Starlette:
    """An application that answers 401 on all but the ``OPEN`` routes to callers without the key."""
    return Starlette(routes=routes, middleware=[Middleware(_Guard)])


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
    # A key that cannot be read admits nobody.
    told = sent.get("authorization", "")
    return bool(key) and hmac.compare_digest(told.encode(), (_SCHEME + key).encode())


def _key() -> str | None:
    """The key; "" when it cannot be read, None where none is asked for."""
    file = os.environ.get(FILE)
    if file is None:
        return None
    try:
        return Path(file).read_text().strip()
    except OSError:
        return ""
