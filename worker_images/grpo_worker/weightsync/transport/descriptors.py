"""Sockets over which trainer ranks pass file descriptors to the engine ranks of their host.

They are files in a folder that pods of a node share; abstract sockets belong to one pod's network.
"""

import os
import secrets
import socket
import struct
import tempfile
from pathlib import Path

from grpo_operator.api.names import SOCKETS_VARIABLE

_RANK = struct.Struct("!I")
_BUFFER = struct.Struct("!QQ")  # its number, and its bytes
_SECONDS = 10.0  # to wait for bytes that have been sent

Shared = tuple[int, int, int]  # number of a buffer, its bytes and its descriptor


class Listener:
    """Socket at which a trainer rank accepts its engine ranks. Close it when all have connected."""

    def __init__(self, engines: int) -> None:
        folder = os.environ.get(SOCKETS_VARIABLE) or tempfile.gettempdir()
        self.path = Path(folder) / f"grpo-{secrets.token_hex(8)}"  # the system allows 107 characters
        self._engines = engines
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(self.path))
        self.path.chmod(0o600)
        self._socket.listen(engines)
        self._socket.setblocking(False)
        self.sockets: dict[int, socket.socket] = {}  # of engine ranks that have come

    def complete(self) -> bool:
        """Accept those that have connected, and return whether all have.

        Raises OSError, also for one that has ended since.
        """
        while len(self.sockets) < self._engines:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return False
            connection.settimeout(_SECONDS)
            data = connection.recv(_RANK.size, socket.MSG_WAITALL)
            if len(data) != _RANK.size:
                raise ConnectionResetError("an engine rank ended when it had connected")
            (rank,) = _RANK.unpack(data)
            self.sockets[rank] = connection
        return True

    def close(self) -> None:
        """Close and remove the file. The connections stay open."""
        self._socket.close()
        self.path.unlink(missing_ok=True)


def call(path: str, rank: int) -> socket.socket:
    """Connect to a trainer rank as engine ``rank``. Raises OSError."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_SECONDS)
    connection.connect(path)
    connection.sendall(_RANK.pack(rank))
    return connection


def pass_on(connection: socket.socket, shared: Shared) -> None:
    """Send a buffer's descriptor. Raises OSError."""
    number, nbytes, descriptor = shared
    socket.send_fds(connection, [_BUFFER.pack(number, nbytes)], [descriptor])


def take(connection: socket.socket, missing: str) -> Shared:
    """Receive a descriptor that has been sent. Raises OSError, with the text ``missing`` at the end."""
    data, descriptors, _, _ = socket.recv_fds(connection, _BUFFER.size, 1)
    if len(data) != _BUFFER.size or not descriptors:
        raise ConnectionResetError(missing)
    number, nbytes = _BUFFER.unpack(data)
    return number, nbytes, descriptors[0]
