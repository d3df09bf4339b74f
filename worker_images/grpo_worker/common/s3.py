"""Object stores that speak S3, as a file system whose errors are those of other file systems."""

import errno
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import s3fs
from botocore.exceptions import (
    BotoCoreError,
    CredentialRetrievalError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)
from fsspec.asyn import sync_wrapper

from grpo_operator.api.v1alpha1.checkpoint import StoreSpec

# Each request is tried this often, with pauses of up to 20 s that double: a store throttles for seconds, and
# the part of one upload is repeated instead of all of it.
_TRIES = 6
_CREDENTIALS = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError)
# What is left of these answers after all tries: the store does not answer now.
_NOT_NOW = (errno.EBUSY, errno.EREMOTEIO)
_LATER, _FULL = (408, 425, 429), 507  # statuses of HTTP


class S3(s3fs.S3FileSystem):  # type: ignore[misc]
    """s3fs whose errors are OSError with a number, where the server or the way to it is at fault."""

    async def _call_s3(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with _as_os_errors():
            return await super()._call_s3(method, *args, **kwargs)

    call_s3 = sync_wrapper(_call_s3)

    def uploads(self, path: str) -> Iterator[tuple[str, str]]:
        """Yield the key and the id of each upload below ``path`` that was not ended."""
        bucket, key, _ = self.split_path(path)
        markers: dict[str, str] = {}
        while True:
            page = self.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=f"{key}/", **markers)
            yield from ((found["Key"], found["UploadId"]) for found in page.get("Uploads") or ())
            if not page.get("IsTruncated"):
                return
            markers = {
                "KeyMarker": page["NextKeyMarker"],
                "UploadIdMarker": page["NextUploadIdMarker"],
            }


@functools.cache
def _register() -> None:
    for scheme in ("s3", "s3a"):
        fsspec.register_implementation(scheme, S3, clobber=True)


def options(store: StoreSpec) -> dict[str, Any]:
    """Return the arguments of the file system for a store. Credentials are found in the environment."""
    _register()
    return {
        "endpoint_url": store.endpoint,
        "client_kwargs": {"region_name": store.region} if store.region else {},
        "config_kwargs": {"retries": {"mode": "standard", "max_attempts": _TRIES}},
        "use_listings_cache": False,  # other processes write too
    }


@contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except TimeoutError as error:
        raise OSError(errno.ETIMEDOUT, str(error)) from error
    except OSError as error:
        number = _number(error)
        if number == error.errno:
            raise
        raise OSError(number, error.strerror or str(error)) from error
    except _CREDENTIALS as error:
        raise PermissionError(errno.EACCES, str(error)) from error
    except ParamValidationError as error:
        raise ValueError(str(error)) from error
    except BotoCoreError as error:  # such as a connection that is refused or cut
        raise OSError(errno.EIO, str(error)) from error


def _number(error: OSError) -> int | None:
    """Return the system's number of an error, for which s3fs uses EIO wherever it does not know the code."""
    answer = getattr(error.__cause__, "response", None) or {}
    code = str(answer.get("Error", {}).get("Code", "")).lower()
    status = int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if status == _FULL or "quota" in code or "storagefull" in code:
        return errno.EDQUOT
    if error.errno == errno.EIO and 400 <= status < 500 and status not in _LATER:
        return errno.EINVAL
    return errno.EIO if error.errno in _NOT_NOW else error.errno
