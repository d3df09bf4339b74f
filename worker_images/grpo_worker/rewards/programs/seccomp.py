"""Filter of system calls: an allow-list, in the kernel's language for packet filters."""

import ctypes
import errno
import struct
from collections.abc import Sequence

from grpo_worker.rewards.programs.kernel import system_call
from grpo_worker.rewards.programs.syscalls import ALLOWED, ARCHITECTURE, JUDGED

_LOAD, _MASK, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
_ALLOW, _ERROR, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_SET_MODE_FILTER = 1

_CLONE_THREAD = 0x00010000
_CLONE_NAMESPACES = 0x7E020000
_UNIX, _STREAM, _KIND = 1, 1, 0xF
_TRUNCATE_ONLY, _TRUNCATE_OR_WRITE = 0o1000, 0o1003  # O_TRUNC with O_RDONLY; O_TRUNC and O_ACCMODE
_FCNTL = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    36,
    37,
    38,
    1030,
    1032,
)  # neither an owner, who gets signals, nor a pipe's size
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x802C542A)  # terminals, FIONREAD, FIONBIO, FIOCLEX
_PRCTL = (15, 16, 0x53564D41)  # names of threads and of memory
_PRETENDED = ("chmod", "fchmod", "fchmodat", "fchmodat2", "utime", "utimes", "futimesat", "utimensat")
_ATTRIBUTES = [name for name in JUDGED if name.endswith("xattr")]

Instruction = tuple[int, int, int, int]
Test = tuple[int, int, int]  # (argument's index, mask, value)


def filter_of(process: int) -> list[Instruction]:
    """Return the filter of one process.

    Threads are allowed, processes are not. Signals reach the process itself only. No socket can be made but
    a connected pair. Landlock does not restrict modes, times and extended attributes of files, but programs
    that copy files need them: changes of the former are pretended, and the latter are said to be unsupported.
    All else fails with EPERM.
    """
    code: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, ARCHITECTURE),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    opened = [(name, index) for name, index in (("open", 1), ("openat", 2)) if name in ALLOWED]
    for name, index in opened:  # a file that may only be read could be emptied before Landlock's version 3
        code += _if(ALLOWED[name], [(index, _TRUNCATE_OR_WRITE, _TRUNCATE_ONLY)], _error(errno.EPERM))
    for number in ALLOWED.values():
        code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for name in ("clone3", "openat2"):  # the C library then uses the older calls, whose flags can be judged
        code += _if(JUDGED[name], [], _error(errno.ENOSYS))
    for name in _PRETENDED:
        if name in JUDGED:
            code += _if(JUDGED[name], [], _error(0))
    for name in _ATTRIBUTES:
        code += _if(JUDGED[name], [], _error(errno.ENOTSUP))
    code += _if(JUDGED["clone"], [(0, _CLONE_THREAD | _CLONE_NAMESPACES, _CLONE_THREAD)])
    for name in ("kill", "tgkill"):
        code += _if(JUDGED[name], [(0, 0xFFFFFFFF, process)])
    code += _if(JUDGED["prlimit64"], [(0, 0xFFFFFFFF, 0)])
    code += _if(JUDGED["setrlimit"], [])
    code += _if(JUDGED["socketpair"], [(0, 0xFFFFFFFF, _UNIX), (1, _KIND, _STREAM)])
    code += _if(JUDGED["sendto"], [(4, 0xFFFFFFFF, 0), (-4, 0xFFFFFFFF, 0)])  # without an address
    for name, index, values in (("fcntl", 1, _FCNTL), ("prctl", 0, _PRCTL)):
        for value in values:
            code += _if(JUDGED[name], [(index, 0xFFFFFFFF, value)])
    for value in _IOCTL:
        code += _if(JUDGED["ioctl"], [(1, 0xFFFFFFFF, value)])
    code += _if(JUDGED["ioctl"], [], _error(errno.ENOTTY))
    code.append((_RETURN, 0, 0, _error(errno.EPERM)))
    return code


def install(code: Sequence[Instruction]) -> None:
    """Filter all further calls of this thread and its successors. Needs ``forbid_new_privileges``."""
    data = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(data)))
    system_call("seccomp", _SET_MODE_FILTER, 0, program)


def _error(code: int) -> int:
    return _ERROR | code


def _if(number: int, tests: Sequence[Test], action: int = _ALLOW) -> list[Instruction]:
    """Take the action for a call whose arguments pass all tests; else go on with the call's number."""
    checks: list[Instruction] = []
    for index, mask, value in tests:
        # The low half of an argument; a negative index means the high half.
        offset = _ARGUMENTS + 8 * abs(index) + (4 if index < 0 else 0)
        checks += [(_LOAD, 0, 0, offset), (_MASK, 0, 0, mask), (_EQUAL, 0, 0, value)]
    # Each failing test jumps behind the action, to the instruction that loads the call's number again.
    length = len(checks)
    checks = [
        (kind, 0, length - place, value) if kind == _EQUAL else (kind, 0, 0, value)
        for place, (kind, _, _, value) in enumerate(checks)
    ]
    code = [*checks, (_RETURN, 0, 0, action)]
    if tests:
        code.append((_LOAD, 0, 0, _NUMBER))
    return [(_EQUAL, 0, len(code), number), *code]
