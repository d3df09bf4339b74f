"""A proxy between an agent and a rank of its engine, which spoils or cuts the stream."""

import socket
import threading
from contextlib import suppress


class StreamProxy:
    """Passes one connection on to ``port``. ``at``: byte from the agent to the rank at which harm is done.

    ``cut``: the connection ends there; else a bit flips. ``harmed``: whether it has happened.
    """

    def __init__(self, port: int, at: int, cut: bool = False) -> None:
        self._upstream, self._at, self._cut = port, at, cut
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.harmed = False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        rank, _ = self._server.accept()
        self._server.close()
        agent = socket.create_connection(("127.0.0.1", self._upstream))
        threading.Thread(target=self._up, args=(rank, agent), daemon=True).start()
        passed = 0
        with suppress(OSError):
            while data := bytearray(agent.recv(1 << 16)):
                if passed <= self._at < passed + len(data):
                    self.harmed = True
                    if self._cut:
                        break
                    data[self._at - passed] ^= 8
                passed += len(data)
                rank.sendall(data)
        _close(rank, agent)

    def _up(self, rank: socket.socket, agent: socket.socket) -> None:
        with suppress(OSError):
            while data := rank.recv(1 << 16):
                agent.sendall(data)
        _close(agent)


def _close(*sockets: socket.socket) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
