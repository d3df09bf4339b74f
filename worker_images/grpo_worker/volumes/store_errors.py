"""Classification of the job's store's errors as permanent or transient."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from grpo_worker.volumes.remote.errors import PermanentFetchError, TransientFetchError

_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_IN_THE_WAY = frozenset({errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY})


class StoreUnavailableError(TransientFetchError):
    """The job's store cannot be read or written now, for example because its NFS server is down."""


@contextmanager
def store_errors() -> Iterator[None]:
    """Convert OSError to PermanentFetchError or StoreUnavailableError."""
    try:
        yield
    except TransientFetchError:
        raise
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise PermanentFetchError(
                "the job's store is full: free space in it, or set another checkpoint.store"
            ) from error
        if error.errno in _FORBIDDEN:
            raise PermanentFetchError(
                f"the job's store cannot be written to: {error}: allow pods to write to it, or set another "
                "checkpoint.store"
            ) from error
        if error.errno in _IN_THE_WAY:
            raise PermanentFetchError(
                f"something in the job's store is in the way: {error}: remove it"
            ) from error
        raise StoreUnavailableError(f"job's store: {error}") from error
