"""Google Cloud Storage as a file system whose errors are those of other file systems."""

import asyncio
import errno
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import aiohttp
import fsspec
from fsspec.asyn import AsyncFileSystem, sync_wrapper
from gcsfs.core import GCSFile, GCSFileSystem
from gcsfs.retry import HttpError
from requests.exceptions import RequestException

from grpo_operator.api.v1alpha1.checkpoint import StoreSpec
from grpo_worker.common.google_tokens import AccessTokens

# gcsfs sets no limits. That of a whole request is for a body that nobody reads any more.
_LIMITS = aiohttp.ClientTimeout(total=600, sock_connect=20, sock_read=60)
_AT_ONCE = 32  # objects that are removed at a time
_LATER = (408, 410, 425, 429)  # statuses of HTTP; 410: an upload has ended that must begin again
_REFUSED = (401, 403)


class GoogleStorage(GCSFileSystem):  # type: ignore[misc]
    """gcsfs whose errors are OSError with a number, where the server or the way to it is at fault.

    gcsfs tries each request six times, with pauses that double, and creates an object on the condition that
    it has no generation if that is asked of it.
    """

    def __init__(self, from_secret: bool = False, **options: Any) -> None:
        super().__init__(
            token="anon",  # noqa: S106 - replaced below
            consistency="size",
            requests_timeout=_LIMITS,
            session_kwargs={"trust_env": True},  # proxies, as clients of S3 do
            **options,
        )
        self.credentials = AccessTokens(from_secret)

    async def _call(self, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        with _as_os_errors():
            try:
                return await super()._call(method, path, *args, **kwargs)
            except FileNotFoundError as error:
                if "upload_id=" in path:
                    raise OSError(errno.EIO, f"the server has forgotten an upload: {error}") from error
                raise

    call = sync_wrapper(_call)

    async def _pipe_file(self, *args: Any, **kwargs: Any) -> Any:
        with _as_os_errors():
            return await super()._pipe_file(*args, **kwargs)

    async def _put_file(self, *args: Any, **kwargs: Any) -> Any:
        with _as_os_errors():
            return await super()._put_file(*args, **kwargs)

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> "_File":
        size = block_size or self.default_block_size
        options = {"cache_type": "readahead", "consistency": self.consistency} | options
        return _File(self, path, mode, size, **options)

    async def _rm_file(self, path: str, **kwargs: Any) -> None:
        """Remove an object, which need not exist: the answer to an earlier try may have been lost."""
        with suppress(FileNotFoundError):
            await super()._rm_file(path, **kwargs)

    async def _delete_files(self, files: Sequence[str], _batchsize: int) -> list[Any]:
        """Remove objects by a request each: those that gcsfs puts into one request fail without a number."""
        found: list[Any] = []
        for start in range(0, len(files), _AT_ONCE):
            requests = (self._rm_file(file) for file in files[start : start + _AT_ONCE])
            found += await asyncio.gather(*requests, return_exceptions=True)
        return found

    async def _mv_file(self, path1: str, path2: str) -> None:
        """Copy an object, then remove it: that can be repeated, and takes no further permission."""
        await AsyncFileSystem._mv_file(self, path1, path2)


class _File(GCSFile):  # type: ignore[misc]
    """File of ``GoogleStorage``."""

    def _upload_chunk(self, final: bool = False) -> Any:
        with _as_os_errors():
            return super()._upload_chunk(final)


@functools.cache
def _register() -> None:
    for scheme in ("gs", "gcs"):
        fsspec.register_implementation(scheme, GoogleStorage, clobber=True)


def options(store: StoreSpec) -> dict[str, Any]:
    """Return the arguments of the file system for a store. A key is found in the environment."""
    _register()
    return {
        "endpoint_url": store.endpoint,
        "from_secret": store.secret is not None,
        "use_listings_cache": False,  # other processes write too
    }


@contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, FileExistsError):
        raise
    except TimeoutError as error:
        raise OSError(errno.ETIMEDOUT, str(error) or "no answer in time") from error
    except HttpError as error:
        raise OSError(_number(error.code), str(error)) from error
    except (aiohttp.ClientError, RequestException) as error:  # such as a connection that is refused or cut
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
    except AssertionError as error:  # an upload of which the server has another size or end
        raise OSError(errno.EIO, str(error)) from error
    except OSError as error:
        if error.errno is not None:
            raise
        refused = str(error).startswith("Forbidden")
        raise OSError(errno.EACCES if refused else errno.EIO, str(error)) from error
    except ValueError as error:  # what gcsfs makes of some bad requests
        raise OSError(errno.EINVAL, str(error)) from error


def _number(code: Any) -> int:
    """Return the system's number of an answer's status, which may be text in the answer."""
    status = int(code) if str(code).isdigit() else 0
    if status in _REFUSED:
        return errno.EACCES
    return errno.EINVAL if 400 <= status < 500 and status not in _LATER else errno.EIO
