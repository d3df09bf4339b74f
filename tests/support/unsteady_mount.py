"""Program: mounts a folder a second time through FUSE, where calls hang or fail while a file says so.

Arguments: the folder, the mount point, and the file with the mode: ``well``, ``hang``, or a name of errno.
"""

import errno
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mfusepy import FUSE, FuseOSError, Operations, fuse_get_context

WELL, HANG = "well", "hang"
_LOOK_SECONDS = 0.1  # between two looks at the mode while a call hangs
_STAT = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_atime", "st_mtime", "st_ctime", "st_ino")
_SPACE = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_favail")


class Folder:
    """System calls on files of a folder, with paths as a file system gets them: ``/name``."""

    use_ns = True

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def _at(self, path: str) -> str:
        return self._folder + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._at(path))
        values = {key: getattr(found, key) for key in _STAT}
        return values | {key: getattr(found, f"{key}_ns") for key in ("st_atime", "st_mtime", "st_ctime")}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def open(self, path: str, flags: int) -> int:
        return os.open(self._at(path), flags)

    def create(self, path: str, mode: int, fi: int | None = None) -> int:
        descriptor = os.open(self._at(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        self._give(path)
        return descriptor

    def _give(self, path: str) -> None:
        """Make a new file the caller's: this process makes it as root."""
        user, group, _ = fuse_get_context()
        os.chown(self._at(path), user, group, follow_symlinks=False)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self._at(path), length)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        os.fsync(fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._at(path), mode)
        self._give(path)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._at(path))
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self._at(path))
        return 0

    def rename(self, old: str, new: str) -> int:
        os.rename(self._at(old), self._at(new))
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(self._at(source), self._at(target))
        return 0

    def symlink(self, target: str, source: str) -> int:
        os.symlink(source, self._at(target))
        self._give(target)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._at(path), mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        os.chown(self._at(path), uid, gid, follow_symlinks=False)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        now = time.time_ns()
        os.utime(self._at(path), ns=times or (now, now), follow_symlinks=False)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        return {key: getattr(found, key) for key in _SPACE}


class Mode:
    """State of the store, as a file names it. ``met``: a file with a byte for each call that met it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._met = file.with_suffix(".met").open("ab", buffering=0)
        self._lock = threading.Lock()

    def meet(self) -> None:
        """Return when calls are well again. Raises the error of the mode."""
        counted = False
        while (mode := self._file.read_text().strip()) != WELL:
            if not counted:
                with self._lock:
                    self._met.write(b".")
                counted = True
            if mode != HANG:
                raise FuseOSError(getattr(errno, mode))
            time.sleep(_LOOK_SECONDS)


def _methods() -> Iterator[str]:
    return (name for name in vars(Folder) if not name.startswith("_") and callable(getattr(Folder, name)))


def _met(name: str, mode: Mode, folder: Folder) -> Callable[..., Any]:
    def call(_: Any, *arguments: Any) -> Any:
        if name != "release":  # which loses nothing and tells nobody
            mode.meet()
        return getattr(folder, name)(*arguments)

    return call


def main() -> None:
    folder, mount, control = map(Path, sys.argv[1:])
    mode, files = Mode(control), Folder(folder)
    members = {name: _met(name, mode, files) for name in _methods()}
    operations = type("Unsteady", (Operations,), {"use_ns": True, **members})()
    FUSE(operations, str(mount), foreground=True, allow_other=True, default_permissions=True, nothreads=False)


if __name__ == "__main__":
    main()
