"""Keep a process's memory and environment from programs that it starts."""

import ctypes
import os

_PR_SET_DUMPABLE = 4


def hide_memory() -> None:
    """Close environ, mem and fd in /proc/PID of this process to others of its user.

    Those with CAP_SYS_PTRACE still see them. Raises OSError when the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_DUMPABLE): {os.strerror(number)}")
