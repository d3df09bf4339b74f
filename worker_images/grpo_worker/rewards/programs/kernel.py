"""Calls into the kernel that Python lacks."""

import contextlib
import ctypes
import os

from grpo_worker.rewards.programs.syscalls import CONFINING

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITIES_VERSION = 0x20080522


def system_call(name: str, *arguments: object) -> int:
    """Make a system call; return its result. Raises OSError, which names the call."""
    result = int(_LIBC.syscall(ctypes.c_long(CONFINING[name]), *arguments))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def forbid_new_privileges() -> None:
    """Make set-user-ID programs and file capabilities ineffective, for good; filters require it."""
    _prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when ``parent``, which forked it, ends."""
    _prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, 9)
    if os.getppid() != parent:
        os._exit(1)


def be_killed_first() -> None:
    """Let a node or pod without memory kill this process before any other."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def drop_capabilities() -> None:
    """Give up all capabilities, also those of a root user and of a new user namespace."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
    system_call("capset", header, (ctypes.c_uint32 * 6)())


def _prctl(name: str, option: int, value: int) -> None:
    if _LIBC.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({name}): {os.strerror(code)}")
