"""Streams over real connections: each has its own, and finished ones are used again."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from grpo_worker.rollout import engine_http
from grpo_worker.rollout.connections import Connections
from grpo_worker.rollout.engine_http import EngineHttp

STREAMS, PARTS = 200, 3
ANSWER = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n6\r\npart-0\r\n"


class Server:
    """HTTP/1.1 server whose answers are streams of parts.

    An answer to ``{"wait": true}`` never ends. To ``{"break": N}`` the server closes the connection after N
    bytes of the answer.
    """

    def __init__(self) -> None:
        self.opened = 0
        self.open = 0
        self.gate = asyncio.Barrier(STREAMS)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        self.open += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                if "break" in body:
                    writer.write(ANSWER[: body["break"]])
                    await writer.drain()
                    return
                writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
                if "wait" in body:
                    await reader.read()
                    return
                await self.gate.wait()  # all streams are open at once
                for part in range(PARTS):
                    writer.write(b"6\r\npart-%d\r\n" % part)
                    await writer.drain()
                    await asyncio.sleep(0.01)
                writer.write(b"0\r\n\r\n")
        except asyncio.IncompleteReadError:
            pass
        finally:
            self.open -= 1
            writer.close()


@asynccontextmanager
async def _serving() -> AsyncIterator[tuple[Server, EngineHttp]]:
    server = Server()
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0, backlog=STREAMS)
    http = EngineHttp(Connections(), listener.sockets[0].getsockname()[1])
    try:
        yield server, http
    finally:
        await http.aclose()
        listener.close()


async def _read(http: EngineHttp, number: int) -> bytes:
    async with http.post("127.0.0.1", "/generate", {"number": number}) as response:
        return await response.aread()


async def _receive(http: EngineHttp, body: dict[str, int], received: bytearray) -> None:
    async with http.post("127.0.0.1", "/generate", body) as response:
        assert isinstance(response.stream, httpx.AsyncByteStream)
        async for part in response.stream:
            received += part


def test_all_streams_are_open_at_once_and_connections_are_used_again() -> None:
    async def run() -> None:
        async with _serving() as (server, http):
            for _ in range(2):
                bodies = await asyncio.gather(*(_read(http, number) for number in range(STREAMS)))
                assert set(bodies) == {b"part-0part-1part-2"}
            assert server.opened == STREAMS

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_cancelled_request_closes_its_connection() -> None:
    async def run() -> None:
        async with _serving() as (server, http):

            async def wait() -> None:
                async with http.post("127.0.0.1", "/generate", {"wait": True}) as response:
                    await response.aread()

            task = asyncio.create_task(wait())
            while not server.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            task.cancel()
            while server.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert (await asyncio.gather(task, return_exceptions=True))[0].__class__ is asyncio.CancelledError

    asyncio.run(asyncio.wait_for(run(), 60))


def test_an_answer_that_is_left_early_closes_its_connection() -> None:
    async def run() -> None:
        async with _serving() as (server, http):
            async with http.post("127.0.0.1", "/generate", {"wait": True}) as response:
                assert response.status_code == 200 and server.open == 1
            while server.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("length", [0, 10, 47, len(ANSWER) - 4, len(ANSWER)])
def test_an_answer_that_breaks_is_an_error_of_the_transport(length: int) -> None:
    async def run() -> None:
        async with _serving() as (_, http):
            received = bytearray()
            with pytest.raises(httpx.TransportError) as raised:
                await _receive(http, {"break": length}, received)
            assert not isinstance(raised.value, httpx.ConnectError) and str(raised.value)
            assert b"part-0".startswith(received)
            assert received or length < len(ANSWER)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_refused_connection_is_an_error_of_the_transport() -> None:
    async def run() -> None:
        http = EngineHttp(Connections(), 9)
        with pytest.raises(httpx.ConnectError):
            await http.get("127.0.0.1", "/v1/loads")
        await http.aclose()

    asyncio.run(run())


def test_a_host_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        with socket.socket() as full:  # its queue of one connection is full: more are not answered
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            address = full.getsockname()
            waiting = [socket.socket() for _ in range(4)]
            for one in waiting:
                one.setblocking(False)
                one.connect_ex(address)
            http = EngineHttp(Connections(), address[1])
            with pytest.raises(httpx.ConnectTimeout):
                await http.get("127.0.0.1", "/v1/loads")
            await http.aclose()
            for one in waiting:
                one.close()

    monkeypatch.setattr(engine_http, "CONNECT_SECONDS", 0.2)
    asyncio.run(asyncio.wait_for(run(), 60))
