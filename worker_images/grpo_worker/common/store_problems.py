"""What is wrong with a store, according to the errors of those who read and write it."""

import errno
import re
from typing import Final

from grpo_worker.common.errors import causes_of

STORE: Final = "checkpoint.store"

# Errors of a file system whose server or disk does not answer. A file that is missing, forbidden or too large
# is not among them: the job names it.
_NO_ANSWER = frozenset(
    {
        errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ENODEV, errno.ENXIO, errno.EREMOTEIO,
        errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
        errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET,
    }
)  # fmt: skip
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_AGAIN = "the job tries again by itself"
# What is missing and the remedy, for stores that others must change before anybody can write to them.
_UNWRITABLE = {
    errno.ENOSPC: f"is full: free space in it or enlarge it; {_AGAIN}",
    errno.EDQUOT: f"has no quota left: free space in it or raise the quota; {_AGAIN}",
    errno.EROFS: f"is mounted read-only: make it writable; {_AGAIN}",
}


class UnwritableStoreError(RuntimeError):
    """A file was not written. ``errno``: of the first cause, 0 if there is none; it survives pickling."""

    def __init__(self, message: str, errno: int = 0) -> None:
        super().__init__(message)
        self.errno = errno


def errno_of(error: BaseException) -> int:
    """Return the system's number of an error while something was written; 0 if none is known.

    safetensors, in Rust, has it in the message only. torch replaces an error of a write by one of its own
    about the file that is not complete.
    """
    for found in causes_of(error, contexts=True):
        number = getattr(found, "errno", None)
        if isinstance(number, int) and number:
            return number
        if said := _OS_ERROR.search(str(found)):
            return int(said.group(1))
    return 0


def answers_not(error: BaseException) -> bool:
    """Return whether a store that does not answer is among the causes of an error."""
    return bool(_NO_ANSWER.intersection(getattr(found, "errno", None) for found in causes_of(error)))


def store_problem(error: BaseException, store: str = STORE) -> str:
    """Return what is wrong with a store if that is among the causes of an error, also of a rank's, or "".

    ``store``: its name in the message. No store is the fault of the job that uses it.
    """
    numbers = [getattr(found, "errno", None) for found in causes_of(error)]
    for number in numbers:
        if number in _UNWRITABLE:
            return f"{store} {_UNWRITABLE[number]}"
    return "a store does not answer" if answers_not(error) else ""


def with_store_problem(message: str, error: BaseException, store: str = STORE) -> str:
    """Return the message of an error, with what is wrong with a store, if anything is."""
    problem = store_problem(error, store)
    return f"{message} ({problem})" if problem else message
