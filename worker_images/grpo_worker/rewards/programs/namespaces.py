"""Namespaces of the process that starts programs: a second boundary where containers may make them.

Most container runtimes refuse them to processes without privileges.
"""

import ctypes
import os
from pathlib import Path

_NEW_UTS, _NEW_IPC, _NEW_USER, _NEW_NET = 0x04000000, 0x08000000, 0x10000000, 0x40000000


def enter_namespaces() -> bool:
    """Move this process into own user, network, IPC and UTS namespaces; return whether that was permitted.

    Its user keeps its id. Another process tries it first, because a namespace of users cannot be left again.
    """
    attempt = os.fork()
    if attempt == 0:
        os._exit(0 if _enter() else 1)
    return os.waitpid(attempt, 0)[1] == 0 and _enter()


def _enter() -> bool:
    user, group = os.geteuid(), os.getegid()
    try:
        if ctypes.CDLL(None).unshare(_NEW_USER | _NEW_NET | _NEW_IPC | _NEW_UTS):
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    except OSError:
        return False
    return True
