"""Rank streams: connections from an agent to ranks of its engine, which are on the agent's host.

All get the same bytes, or each one those that it keeps.
"""

import contextlib
import socket
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from grpo_worker.weightsync.agent.blobs import Bytes
from grpo_worker.weightsync.agent.engine_client import EngineError
from grpo_worker.weightsync.planner.rank_parts import FIELDS, Table
from grpo_worker.weightsync.protocol.agent_stream import (
    BEAT,
    COUNT,
    FINGERPRINT,
    LOOPBACK,
    STREAM,
    greeting,
)

_LOOK_SECONDS = 0.5  # between two looks whether the engine has given up
_GREETING_SECONDS = 10.0


class RankStreams:
    """Listens at once, and sends buckets to the engine's ranks ``ranks`` after ``accept``.

    ``address``: at which the ranks reach this process. ``timeout``: seconds in which a rank must take some
    bytes. Only ranks that know ``name``, which they get by the engine's control route, are accepted.
    ``port``: at which it listens.
    """

    def __init__(self, name: str, ranks: range, timeout: float, address: str = LOOPBACK) -> None:
        self.name = name
        self._ranks = ranks
        self._timeout = timeout
        self._connections: dict[int, socket.socket] = {}  # by rank
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=len(ranks) + 8)
        self._server.settimeout(_LOOK_SECONDS)
        self.port: int = self._server.getsockname()[1]
        self._threads = ThreadPoolExecutor(len(ranks))

    def accept(self, ended: Callable[[], bool]) -> int:
        """Accept the ranks until ``ended``, before which they connect; return how many are missing."""
        expected = {greeting(self.name, rank): rank for rank in self._ranks}
        with self._server:
            while expected:
                last = ended()
                try:
                    connection, _ = self._server.accept()
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
        self._connections = dict(sorted(self._connections.items()))
        return len(expected)

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
        """Wait until every rank has told which regions it keeps; return their tables, in order of the ranks.

        A rank that records shows by beats that it makes progress. ``given_up``: whether the engine has ended
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

        return list(self._threads.map(receive, self._connections))

    def send_parts(self, parts: Callable[[int], Iterable[memoryview]], given_up: Callable[[], bool]) -> None:
        """Send every rank what ``parts`` returns for its position among the ranks. Raises EngineError."""

        def send(position: int, connection: socket.socket) -> None:
            for part in parts(position):
                self._send(connection, part, given_up)

        connections = self._connections.values()
        list(self._threads.map(send, range(len(connections)), connections))

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

    def abort(self) -> None:
        """End the connections: ranks that wait for bytes give up, and so does a sender. Thread-safe."""
        for connection in list(self._connections.values()):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connections, and free what belongs to them."""
        self._server.close()
        self.abort()  # threads that still wait for a rank end
        self._threads.shutdown(cancel_futures=True)
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
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
