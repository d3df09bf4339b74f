"""Engine stream: connections from an agent to its engine's ranks.

All get the same bytes, or each one those that it keeps.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from grpo_worker.weightsync.agent.blobs import Bytes
from grpo_worker.weightsync.agent.engine_client import Engine, EngineError
from grpo_worker.weightsync.planner.rank_parts import FIELDS, Table
from grpo_worker.weightsync.protocol.agent_stream import BEAT, COUNT, FINGERPRINT, STREAM, greeting
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
        self._connections: dict[int, socket.socket] = {}  # by rank
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

        list(self._threads.map(send, self._connections.values()))

    def receive_kept(self, given_up: Callable[[], bool]) -> list[Table]:
        """Wait until every rank has told which regions it keeps; return their tables, by rank.

        A rank must send the table or a beat within the timeout. ``given_up``: whether the engine has ended
        the request. Raises EngineError.
        """

        def receive(rank: int) -> Table:
            count = BEAT
            while count == BEAT:
                (count,) = COUNT.unpack(self.receive(rank, COUNT.size, given_up))
            if count < 0:
                raise EngineError(f"rank {rank} of the engine keeps {count} regions: use one release")
            data = self.receive(rank, count * FIELDS * np.dtype(np.int32).itemsize, given_up)
            return np.frombuffer(data, dtype="<i4").astype(np.int32, copy=False).reshape(count, FIELDS)

        return list(self._threads.map(receive, range(len(self._connections))))

    def send_parts(self, parts: Callable[[int], Iterable[memoryview]], given_up: Callable[[], bool]) -> None:
        """Send every rank what ``parts`` returns for it. Raises EngineError."""

        def send(rank: int) -> None:
            for part in parts(rank):
                self._send(self._connections[rank], part, given_up)

        list(self._threads.map(send, self._connections))

    def close(self) -> None:
        """Close the connections: ranks that wait for bytes give up at once."""
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # threads that still wait for a rank end
        self._threads.shutdown(cancel_futures=True)
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.close()

    def _accept(self, server: socket.socket, ranks: int, joined: threading.Event) -> int:
        """Accept the ranks, which connect before they have ``joined``; return how many are missing."""
        expected = {greeting(self.name, rank): rank for rank in range(ranks)}
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
                connection.settimeout(_LOOK_SECONDS)
                self._connections[expected.pop(hello)] = connection
            else:
                connection.close()
        return len(expected)

    def ask(self, rank: int, request: bytes) -> None:
        """Send a request to one rank. Raises EngineError."""
        self._send(self._connections[rank], memoryview(request), lambda: False)

    def receive(self, rank: int, size: int, given_up: Callable[[], bool] = lambda: False) -> bytearray:
        """Return the next ``size`` bytes from a rank. Raises EngineError."""
        data, moved = bytearray(size), time.monotonic()
        rest = memoryview(data)
        while rest:
            try:
                got = self._connections[rank].recv_into(rest)
            except TimeoutError as error:
                if given_up():
                    raise EngineError("the engine has ended the request") from error
                if time.monotonic() - moved > self._timeout:
                    raise EngineError(
                        f"ReadTimeout: rank {rank} has sent nothing for {self._timeout:.0f} s"
                    ) from error
                continue
            except OSError as error:
                raise EngineError(f"rank {rank} of the engine has gone: {error!r}") from error
            if not got:
                raise EngineError(f"rank {rank} of the engine has closed the stream")
            rest, moved = rest[got:], time.monotonic()
        return data

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
