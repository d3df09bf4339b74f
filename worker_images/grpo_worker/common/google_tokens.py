"""Access tokens for Google Cloud: of a key in the environment, or of the identity that the pod has."""

import errno
import json
import os
from typing import Any

import google.auth
from gcsfs.retry import HttpError
from google.auth.exceptions import GoogleAuthError, TransportError
from google.auth.transport.requests import Request
from google.oauth2 import service_account

from grpo_operator.api.names import GOOGLE_KEY, GOOGLE_KEY_VARIABLE
from grpo_worker.common.errors import causes_of

_SCOPES = ["https://www.googleapis.com/auth/devstorage.read_write"]
_UNAVAILABLE = 503  # a status of HTTP after which gcsfs tries again


class AccessTokens:
    """The credentials of a ``GCSFileSystem``, which asks for them before each request.

    ``from_secret``: they are a service account's key in the environment, not those that Google's library
    finds: a file, or the metadata server, which has the identity of the pod's service account on GKE.
    """

    project = ""

    def __init__(self, from_secret: bool) -> None:
        self._from_secret = from_secret
        self._credentials: Any = None

    def apply(self, headers: dict[str, str]) -> None:
        """Add a valid token to the headers of a request.

        Raises PermissionError if there are no credentials or they are refused.
        """
        try:
            if self._credentials is None:
                self._credentials = _key() if self._from_secret else _identity()
            if not self._credentials.valid:
                self._credentials.refresh(Request())
            self._credentials.apply(headers)
        except GoogleAuthError as error:
            text = str(error.args[0] if error.args else error)  # answers may follow
            if _passes(error):
                raise HttpError({"code": _UNAVAILABLE, "message": text}) from error
            raise PermissionError(errno.EACCES, text) from error


def _key() -> service_account.Credentials:
    text = os.environ.get(GOOGLE_KEY_VARIABLE, "")
    try:
        return service_account.Credentials.from_service_account_info(json.loads(text), scopes=_SCOPES)
    except (ValueError, TypeError, AttributeError) as error:
        raise PermissionError(
            errno.EACCES, f"{GOOGLE_KEY} is not the JSON key of a service account: {error}"
        ) from error


def _identity() -> Any:
    return google.auth.default(scopes=_SCOPES, request=Request())[0]


def _passes(error: GoogleAuthError) -> bool:
    """Return whether an error is one of the way to a token: later it may work."""
    for found in causes_of(error):
        if isinstance(found, TransportError):
            answer = found.args[1] if len(found.args) > 1 else None
            return answer is None or answer.status >= 500
    return bool(error.retryable)
