"""Why a file could not be fetched, and whether another try can help."""

from collections.abc import Iterator
from contextlib import contextmanager

_PASSING = frozenset({408, 425, 429})  # 4xx that mean: later


class RefusedError(ValueError):
    """Another try gives the same answer: somebody must change something."""


class InterruptedFetchError(ConnectionError):
    """Another try may succeed."""


@contextmanager
def translated(token: str | None) -> Iterator[None]:
    """Turn what client libraries raise into one of the two errors of this module.

    ``token``: what the request was made with.
    """
    try:
        yield
    except (RefusedError, InterruptedFetchError):
        raise
    except Exception as error:  # each library has its own; those of object stores may not be installed
        raise _translate(error, token) from error


def _translate(error: Exception, token: str | None) -> Exception:
    status = _status(error)
    if status in (401, 403) or isinstance(error, PermissionError):
        return RefusedError(f"{status or 'access denied'}: {_access(token)}")
    if status == 404 or (status is None and isinstance(error, FileNotFoundError) and not error.__cause__):
        return RefusedError("there is no such file or directory: correct uri")
    text = " ".join(str(error).split())[:200] or type(error).__name__
    if status is not None and 400 <= status < 500 and status not in _PASSING:
        return RefusedError(f"{text}: correct uri")
    if isinstance(error, ImportError | ValueError | TypeError):
        return RefusedError(text)
    return InterruptedFetchError(text if status is None else f"status {status}")


def _status(error: BaseException | None) -> int | None:
    """HTTP status of an error or of what caused it, as httpx and aiohttp have it."""
    while error is not None:
        reply = getattr(error, "response", None)
        status = getattr(reply, "status_code", None) or getattr(error, "status", None)
        if isinstance(status, int):
            return status
        error = error.__cause__
    return None


def _access(token: str | None) -> str:
    if token:
        return "the credential does not give access: use a token that does, or correct uri"
    return "it needs a credential, or it does not exist: set credential, or correct uri"
