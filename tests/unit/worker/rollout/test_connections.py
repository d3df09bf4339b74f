"""Streams over real connections: each has its own, and finished ones are used again."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from grpo_worker.rollout.connections import Connections
from grpo_worker.rollout.engine_http import EngineHttp

STREAMS, PARTS = 200, 3


class Server:
    """HTTP/1.1 server whose answers are streams of parts; a body ``{"wait": true}`` never ends."""

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


def test_a_refused_connection_is_an_error_of_the_transport() -> None:
    async def run() -> None:
        http = EngineHttp(Connections(), 9)
        with pytest.raises(httpx.ConnectError):
            await http.get("127.0.0.1", "/v1/loads")

    asyncio.run(run())
