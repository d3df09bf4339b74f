"""Authentication of HTTP calls between the pods of a job, of a pool, and the operator.

Keys protect the routes that move weights or control a job. The operator mounts them as files, which are read
for every call, so that a new epoch takes effect at once; see grpo_operator/api/keys.py. Each process has the
key of its job or pool. A job and the shared pool that it uses have a key between them besides.
"""

import hashlib
import hmac
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from grpo_operator.api.keys import Epochs, pair_key, token

# Variables with paths. FILE: of the process's own key; if it is unset (outside of pods), no key is needed.
# EPOCH_FILE: of the epochs; if it is unset (in pods that an operator without epochs has made), the key itself
# is sent. PAIR_FILE: in a job's pods, of the key between the job and its shared pool.
FILE, EPOCH_FILE, PAIR_FILE = "GRPO_KEY_FILE", "GRPO_EPOCH_FILE", "GRPO_PAIR_KEY_FILE"
# Routes without authentication, for probes, Prometheus and users.
OPEN = frozenset(
    {"/healthz", "/readyz", "/enginez", "/turnz", "/hostz", "/metrics", "/v1/status", "/v1/gpus"}
)
_SCHEME = "Bearer "


class _Served:
    writer: str | None = None


_served = _Served()  # by this process, if it is an agent of a shared pool


def serve(writer: str | None) -> None:
    """Use, in an agent of a shared pool, the key between the pool and the job ``writer`` from now on."""
    _served.writer = writer


def served() -> str | None:
    """Return the job that ``serve`` has named."""
    return _served.writer


def headers() -> dict[str, str]:
    """Return the HTTP headers of a call within the job or pool; empty if no key is configured."""
    return _credentials(_key())


def pair_headers() -> dict[str, str]:
    """Return the HTTP headers of a call from a job to its engines, or from engines to their trainers.

    They differ from ``headers`` where the engines belong to a shared pool.
    """
    pair = _pair()
    return _credentials(_key() if pair is None else pair)


def guarded(routes: Sequence[BaseRoute], pair: Callable[[str], bool] = lambda _: False) -> Starlette:
    """Return an application that answers 401 to callers without the key, except on ``OPEN`` routes.

    ``pair``: whether the other side of a shared pool may use a path.
    """
    return Starlette(routes=routes, middleware=[Middleware(_Guard, pair)])


def signature(purpose: bytes, content: Any) -> str:
    """Return what only a holder of the key can compute for some JSON; a plain digest if no key is configured.

    ``purpose``: at most 16 bytes. A signature for one purpose is none for another. It stays valid in later
    epochs. Raises PermissionError when the key cannot be read.
    """
    key = _key()
    if key == "":
        raise PermissionError(f"the key of this job's pods in {os.environ[FILE]} cannot be read")
    derived = hashlib.blake2b(key.encode(), digest_size=32, person=purpose).digest() if key else b""
    text = json.dumps(content, sort_keys=True).encode()
    return hashlib.blake2b(text, key=derived, digest_size=32, person=purpose).hexdigest()


def is_signed(purpose: bytes, content: Any, by: str) -> bool:
    """Return whether ``by`` is the content's signature."""
    return hmac.compare_digest(signature(purpose, content).encode(), by.encode())


class _Guard:
    def __init__(self, app: ASGIApp, pair: Callable[[str], bool]) -> None:
        self._app = app
        self._pair = pair

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN or self._admits(scope["path"], scope):
            await self._app(scope, receive, send)
        else:
            refusal = JSONResponse({"error": "the key of this job's or pool's pods is needed"}, 401)
            await refusal(scope, receive, send)

    def _admits(self, path: str, scope: Scope) -> bool:
        key = _key()
        if key is None:
            return True
        # If no key can be read, every caller is refused.
        keys = filter(None, (key, _pair() if self._pair(path) else None))
        sent = Headers(scope=scope).get("authorization", "").encode()
        return any(hmac.compare_digest(sent, (_SCHEME + good).encode()) for good in _tokens(keys))


def _credentials(key: str | None) -> dict[str, str]:
    if not key or EPOCH_FILE not in os.environ:
        return {"authorization": _SCHEME + key} if key else {}
    epochs = _epochs()
    return {"authorization": _SCHEME + token(key, epochs.sent(time.time()))} if epochs else {}


def _tokens(keys: Iterator[str]) -> Iterator[str]:
    """Return the tokens that are accepted now for these keys."""
    if EPOCH_FILE not in os.environ:
        return keys
    epochs = _epochs()
    accepted = epochs.accepted(time.time()) if epochs else ()
    return (token(key, epoch) for key in keys for epoch in accepted)


def _key() -> str | None:
    """Return the process's own key; "" when it cannot be read, None when none is configured."""
    return _content(FILE)


def _pair() -> str | None:
    """Return the key between job and shared pool; "" when it cannot be read, None when there is none."""
    if PAIR_FILE in os.environ:
        return _content(PAIR_FILE)
    key = _key()
    if _served.writer is None or key is None or EPOCH_FILE not in os.environ:
        return None
    return pair_key(key, _served.writer) if key else ""


def _epochs() -> Epochs | None:
    """Return the epochs; None when they cannot be read."""
    try:
        return Epochs.read(_content(EPOCH_FILE) or "")
    except ValueError:
        return None


def _content(variable: str) -> str | None:
    file = os.environ.get(variable)
    if file is None:
        return None
    try:
        return Path(file).read_text().strip()
    except OSError:
        return ""
