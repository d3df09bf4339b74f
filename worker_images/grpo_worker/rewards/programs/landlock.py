"""Access to files by an allow-list, with Landlock (Linux 5.13), which needs no privilege."""

import contextlib
import ctypes
import errno
import os
import stat
from collections.abc import Iterable

from grpo_worker.rewards.programs.kernel import system_call

_VERSION = 1  # flag of landlock_create_ruleset
_PATH_BENEATH = 1

_WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 1, 1 << 2, 1 << 3
_REMOVE_DIR, _REMOVE_FILE, _MAKE_DIR, _MAKE_REG, _MAKE_SYM = 1 << 4, 1 << 5, 1 << 7, 1 << 8, 1 << 12
_REFER, _TRUNCATE = 1 << 13, 1 << 14
_READ = _READ_FILE | _READ_DIR
_CHANGE = _WRITE_FILE | _REMOVE_DIR | _REMOVE_FILE | _MAKE_DIR | _MAKE_REG | _MAKE_SYM | _REFER | _TRUNCATE
_OF_FILES = _READ_FILE | _WRITE_FILE | _TRUNCATE
# Rights on files that each version knows: 13 in the first, then REFER, TRUNCATE and IOCTL_DEV.
_KNOWN = {1: (1 << 13) - 1, 2: (1 << 14) - 1, 3: (1 << 15) - 1, 4: (1 << 15) - 1, 5: (1 << 16) - 1}
_TCP = 0b11  # bind and connect, since version 4
_SCOPES = 0b11  # abstract Unix sockets and signals, since version 6
_MISSING = (
    errno.ENOSYS,
    errno.EOPNOTSUPP,
    errno.EPERM,
)  # EPERM: the filter of a container without these calls


class _Attributes(ctypes.Structure):
    _fields_ = [("fs", ctypes.c_uint64), ("net", ctypes.c_uint64), ("scoped", ctypes.c_uint64)]


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("access", ctypes.c_uint64), ("parent", ctypes.c_int32)]


def landlock_version() -> int:
    """Return the version of the kernel's interface; 0 if there is none."""
    try:
        return system_call("landlock_create_ruleset", None, ctypes.c_size_t(0), _VERSION)
    except OSError as error:
        if error.errno in _MISSING:
            return 0
        raise


def allow_only(version: int, readable: Iterable[str], devices: Iterable[str], writable: str) -> None:
    """Restrict this process, for good, to reading and to one folder that it may change.

    ``readable``: files and folders; those that do not exist are left out. ``devices``: may be read and
    written. Needs ``forbid_new_privileges``.
    """
    known = _KNOWN[min(version, max(_KNOWN))]
    attributes = _Attributes(known, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = system_call("landlock_create_ruleset", ctypes.byref(attributes), ctypes.c_size_t(size), 0)
    try:
        for path in readable:
            with contextlib.suppress(OSError):
                _allow(rules, path, _READ)
        for path in devices:
            with contextlib.suppress(OSError):
                _allow(rules, path, (_READ_FILE | _WRITE_FILE) & known)
        _allow(rules, writable, (_READ | _CHANGE) & known)
        system_call("landlock_restrict_self", rules, 0)
    finally:
        os.close(rules)


def _allow(rules: int, path: str, access: int) -> None:
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(place).st_mode):
            access &= _OF_FILES
        rule = _Beneath(access, place)
        system_call("landlock_add_rule", rules, _PATH_BENEATH, ctypes.byref(rule), 0)
    finally:
        os.close(place)
