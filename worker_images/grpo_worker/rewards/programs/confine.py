"""Confinement of the calling process, in the order that the kernel requires."""

import math
import os
import resource
import sys
from dataclasses import dataclass

from grpo_worker.rewards.programs import kernel, landlock, seccomp
from grpo_worker.rewards.programs.syscalls import ARCHITECTURE

# Besides the interpreter's own folders. The files hold no secrets, and libraries fail without them.
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib")
_FILES = (
    "/etc/ld.so.cache",
    "/etc/localtime",
    "/etc/mime.types",
    "/etc/ssl/openssl.cnf",
    "/usr/share/zoneinfo",
)
_RANDOM = ("/dev/random", "/dev/urandom", "/dev/zero")
_DEVICES = ("/dev/null",)
FILE_BYTES = 64 * 2**20
_OPEN_FILES = 256
_SIGNALS = 1024  # and timers, which the kernel counts for all processes of the user


class UnsupportedError(RuntimeError):
    """The kernel lacks a part of the boundary."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """Kernel's means. ``landlock``: version of Landlock, 0 if there is none."""

    landlock: int
    readable: tuple[str, ...]

    def enter(self, folder: str, seconds: float) -> None:
        """Confine this process for good. ``folder``: the one that it may change."""
        _limit(seconds)
        kernel.be_killed_first()
        kernel.forbid_new_privileges()
        kernel.drop_capabilities()
        if self.landlock:
            landlock.allow_only(self.landlock, self.readable, _DEVICES, folder)
        seccomp.install(seccomp.filter_of(os.getpid()))


def find_boundary(required: bool) -> Boundary:
    """Return what this kernel offers. Raises UnsupportedError if it is not enough.

    ``required``: a kernel without Landlock is not enough.
    """
    if not ARCHITECTURE:
        raise UnsupportedError(f"the filter of system calls does not know {os.uname().machine} processors")
    version = landlock.landlock_version()
    if required and not version:
        raise UnsupportedError(
            "the kernel offers no Landlock (it needs Linux 5.13, landlock among the security modules, a "
            "container runtime whose seccomp profile permits its calls, and no gVisor), so programs could "
            "read the files of the controller's pod"
        )
    return Boundary(version, _readable())


def _readable() -> tuple[str, ...]:
    """Return the folders of the interpreter and its libraries, and files that libraries read."""
    own = {
        os.path.join(prefix, name) for prefix in (sys.prefix, sys.base_prefix) for name in ("lib", "lib64")
    }
    return (*sorted({*own, *sys.path} - {""}), *_LIBRARIES, *_FILES, *_RANDOM)


def _limit(seconds: float) -> None:
    _lower(resource.RLIMIT_FSIZE, FILE_BYTES)
    _lower(resource.RLIMIT_NOFILE, _OPEN_FILES)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_MEMLOCK, 0)
    _lower(resource.RLIMIT_SIGPENDING, _SIGNALS)
    _lower(resource.RLIMIT_CPU, math.ceil(seconds) * (os.cpu_count() or 1))  # threads may use all cores


def _lower(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))
