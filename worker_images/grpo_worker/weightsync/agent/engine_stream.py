"""Engine stream: connections from an agent to its engine's ranks, which all get the same bytes."""

import contextlib
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from grpo_worker.weightsync.agent.blobs import Bytes
from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.protocol.agent_stream import FINGERPRINT, greeting

_LOOK_SECONDS = 0.5  # between two looks whether the engine has given up


class EngineStream:
    """Sends buckets to the ``ranks`` ranks of an engine that loads them directly.

    ``address``: at which the ranks reach this process; ranks on further hosts need another one than the
    loopback. ``timeout``: seconds in which a rank must take some bytes. Only ranks that know ``name``, which
    they get by the engine's control route, are accepted. Raises EngineError if the engine does not join, or
    cannot load directly.
    """

    def __init__(
        self, engine: Engine, name: str, ranks: int, timeout: float, address: str = "127.0.0.1"
    ) -> None:
        self.name = name
        self._timeout = timeout
        self._connections: list[socket.socket] = []
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=ranks + 8) as server:
            self.direct = engine.join_group(address, server.getsockname()[1], name, ranks, 0)
            if self.direct:
                self._accept(server, ranks)
        self._threads = ThreadPoolExecutor(ranks)

    def send(self, data: Bytes, fingerprint: int | None, given_up: Callable[[], bool]) -> None:
        """Send a chunk to all ranks, and after the last one of a bucket the bucket's fingerprint.

        ``given_up``: whether the engine has stopped reading. Raises EngineError.
        """
        parts = [data.data]
        if fingerprint is not None:
            parts.append(memoryview(FINGERPRINT.pack(fingerprint)))

        def send(connection: socket.socket) -> None:
            for part in parts:
                self._send(connection, part, given_up)

        list(self._threads.map(send, self._connections))

    def close(self) -> None:
        """Close the connections: ranks that wait for bytes give up at once."""
        self._threads.shutdown(cancel_futures=True)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.close()

    def _accept(self, server: socket.socket, ranks: int) -> None:
        """Accept the ranks, which have connected while they joined."""
        expected = {greeting(self.name, rank) for rank in range(ranks)}
        server.settimeout(self._timeout)
        try:
            while expected:
                connection, _ = server.accept()
                connection.settimeout(self._timeout)
                hello = connection.recv(len(next(iter(expected))), socket.MSG_WAITALL)
                if hello not in expected:
                    connection.close()
                    continue
                expected.remove(hello)
                connection.settimeout(_LOOK_SECONDS)
                self._connections.append(connection)
        except OSError as error:
            self.close_connections()
            raise EngineError(f"{len(expected)} of {ranks} ranks have not connected: {error!r}") from error

    def close_connections(self) -> None:
        for connection in self._connections:
            connection.close()

    def _send(self, connection: socket.socket, data: memoryview, given_up: Callable[[], bool]) -> None:
        moved = time.monotonic()
        while data:
            try:
                data = data[connection.send(data) :]
                moved = time.monotonic()
            except TimeoutError as error:
                if given_up():
                    raise EngineError("a rank of the engine has stopped reading") from error
                if time.monotonic() - moved > self._timeout:
                    raise EngineError(
                        f"ReadTimeout: a rank read nothing for {self._timeout:.0f} s"
                    ) from error
            except OSError as error:
                raise EngineError(f"a rank of the engine has gone: {error!r}") from error
