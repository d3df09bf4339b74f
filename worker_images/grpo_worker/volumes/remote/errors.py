"""Errors of fetches, divided by whether a retry can help."""

import json
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

_LATER = frozenset({408, 425, 429})  # 4xx that ask for another attempt
_BAD_ADDRESS = (httpx.InvalidURL, httpx.UnsupportedProtocol)
# By name: the drivers that raise them need not be installed.
_NO_CREDENTIALS = frozenset({"NoCredentialsError", "PartialCredentialsError", "DefaultCredentialsError"})


class PermanentFetchError(ValueError):
    """The fetch cannot succeed until the job, its Secret or the source is changed."""


class TransientFetchError(ConnectionError):
    """The fetch failed, but a retry may succeed."""


@contextmanager
def translated(token: str | None) -> Iterator[None]:
    """Convert the errors of client libraries to those of this module.

    ``token``: credential of the request.
    """
    try:
        yield
    except (PermanentFetchError, TransientFetchError):
        raise
    except Exception as error:  # each library has its own errors; some libraries may not be installed
        raise _translate(error, token) from error


def _translate(error: Exception, token: str | None) -> Exception:
    status = _status(error)
    if status in (401, 403) or isinstance(error, PermissionError):
        return PermanentFetchError(f"{status or 'access denied'}: {_access(token)}")
    if status == 404 or (status is None and isinstance(error, FileNotFoundError) and not error.__cause__):
        return PermanentFetchError("there is no such file or directory: correct uri")
    text = " ".join(str(error).split())[:200] or type(error).__name__
    if status is not None and 400 <= status < 500 and status not in _LATER:
        return PermanentFetchError(f"{text}: correct uri")
    if type(error).__name__ in _NO_CREDENTIALS:
        return PermanentFetchError(
            f"{text}: give the init container fetch credentials for it, in spec.controller.podTemplate"
        )
    if isinstance(error, _BAD_ADDRESS):
        return PermanentFetchError(f"{text}: correct uri or endpoint")
    if isinstance(error, json.JSONDecodeError):  # a ValueError, but a proxy may cause it temporarily
        return TransientFetchError(f"the response is not JSON ({text})")
    if isinstance(error, ImportError | ValueError | TypeError):
        return PermanentFetchError(text)
    return TransientFetchError(text if status is None else f"status {status}")


def _status(error: BaseException | None) -> int | None:
    """Return the HTTP status of an httpx or aiohttp error, or of its cause."""
    while error is not None:
        reply = getattr(error, "response", None)
        status = getattr(reply, "status_code", None) or getattr(error, "status", None)
        if isinstance(status, int):
            return status
        error = error.__cause__
    return None


def _access(token: str | None) -> str:
    if token:
        return "the credential does not give access: use another token, or correct uri"
    return "it needs a credential, or it does not exist: set credential, or correct uri"
