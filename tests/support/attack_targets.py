"""Targets of the attacks: a process with a secret, files and sockets, like a controller."""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

SECRET = "the-key-of-the-namespace"


class Targets:
    """Targets in this process and in a folder of its own. ``hit``: whether an attack had an effect on one."""

    def __init__(self) -> None:
        self._root = tempfile.TemporaryDirectory(prefix="attacked-")
        root = Path(self._root.name)
        self.store, self.key, self.other = root / "store", root / "key", root / "grpo-code-other"
        self.store.mkdir()
        (self.store / "run.json").write_text("{}")
        self.other.mkdir()
        (self.other / "program.py").write_text("print(3)")
        self._write_key()
        self._memory = ctypes.create_string_buffer(SECRET.encode())
        self._signals = 0
        signal.signal(signal.SIGUSR1, self._count)
        ctypes.CDLL(None).prctl(
            0x59616D61, ctypes.c_ulong(-1), 0, 0, 0
        )  # PR_SET_PTRACER: as on hosts without Yama
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
        self._sockets(root)
        self._before = self._state()

    def _write_key(self) -> None:
        self.key.write_text(SECRET)
        self.key.chmod(0o600)
        self._open = os.open(self.key, os.O_RDONLY)
        os.set_inheritable(self._open, True)

    def _sockets(self, root: Path) -> None:
        self.tcp = socket.create_server(("127.0.0.1", 0))
        self.unix = socket.socket(socket.AF_UNIX)
        self.unix.bind(str(root / "socket"))
        self.abstract = socket.socket(socket.AF_UNIX)
        self.abstract.bind(f"\0attacked-{os.getpid()}")
        self.udp = socket.socket(type=socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.datagrams.bind(f"\0attacked-datagrams-{os.getpid()}")
        for server in (self.unix, self.abstract):
            server.listen()
        for receiver in (self.udp, self.datagrams):
            receiver.setblocking(False)
        threading.Thread(target=self._greet, daemon=True).start()

    def _greet(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.tcp.accept()
                client.sendall(b"greeting!")

    def _count(self, *_: object) -> None:
        self._signals += 1

    def described(self, folder: str) -> dict[str, Any]:
        """Return what attacks need to know. ``folder``: the attacking program's own."""
        return {
            "secret": SECRET,
            "pid": os.getpid(),
            "group": os.getpgrp(),
            "address": ctypes.addressof(self._memory),
            "key": str(self.key),
            "store": str(self.store),
            "other": str(self.other / "program.py"),
            "folder": folder,
            "tcp": self.tcp.getsockname()[1],
            "udp": self.udp.getsockname()[1],
            "unix": self.unix.getsockname(),
            "abstract": f"attacked-{os.getpid()}",
            "datagrams": f"attacked-datagrams-{os.getpid()}",
        }

    def hit(self) -> bool:
        """Return whether a target has changed or received anything."""
        received = [self._received(s) for s in (self.udp, self.datagrams)]
        return any(received) or self._state() != self._before

    @staticmethod
    def _received(receiver: socket.socket) -> bool:
        try:
            return bool(receiver.recv(9))
        except BlockingIOError:
            return False

    def _state(self) -> tuple[object, ...]:
        status = self.key.stat() if self.key.exists() else None
        return (
            status and (status.st_mode, status.st_size, status.st_mtime, status.st_uid),
            sorted(os.listdir(self.store)),
            self._signals,
            resource.getrlimit(resource.RLIMIT_CORE),
            os.getpriority(os.PRIO_PROCESS, 0),
            os.sched_getaffinity(0),
        )

    def close(self) -> None:
        os.close(self._open)
        for each in (self.tcp, self.unix, self.abstract, self.udp, self.datagrams):
            each.close()
        self._root.cleanup()
