"""Engine stream: connections from an agent to its engine's ranks, which all get the same bytes."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from grpo_worker.weightsync.agent.blobs import Bytes
from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.protocol.agent_stream import FINGERPRINT, STREAM, greeting
from grpo_worker.weightsync.protocol.direct_load import MARK

_LOOK_SECONDS = 0.5  # between two looks whether the engine has given up
_GREETING_SECONDS = 10.0


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
        self._threads = ThreadPoolExecutor(ranks)
        try:
            with socket.create_server((address, 0), family=family, backlog=ranks + 8) as server:
                server.settimeout(_LOOK_SECONDS)
                joined = threading.Event()
                accepted = self._threads.submit(self._accept, server, ranks, joined)
                try:
                    answer = engine.join_group(address, server.getsockname()[1], name, ranks, 0)
                finally:
                    joined.set()
                missing = accepted.result()
            self.direct = MARK in answer
            if self.direct and missing:
                raise EngineError(f"{name}: {missing} of {ranks} ranks have not connected")
        except BaseException:
            self.close()
            raise

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

    def _accept(self, server: socket.socket, ranks: int, joined: threading.Event) -> int:
        """Accept the ranks, which connect before they have ``joined``; return how many are missing."""
        expected = {greeting(self.name, rank) for rank in range(ranks)}
        while expected:
            last = joined.is_set()
            try:
                connection, _ = server.accept()
            except TimeoutError:
                if last:
                    break
                continue
            hello = _hello(connection, len(greeting(self.name, 0)))
            if hello in expected:
                expected.remove(hello)
                connection.settimeout(_LOOK_SECONDS)
                self._connections.append(connection)
            else:
                connection.close()
        return len(expected)

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


def _hello(connection: socket.socket, size: int) -> bytes:
    """Return the greeting, or the beginning of what is none."""
    data = b""
    connection.settimeout(_GREETING_SECONDS)
    with contextlib.suppress(OSError):
        while len(data) < size and data == STREAM.encode()[: len(data)] + data[len(STREAM) :]:
            got = connection.recv(size - len(data))
            if not got:
                break
            data += got
    return data
