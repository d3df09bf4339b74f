"""The rehearsal's network: httpx clients and name look-ups reach stand-ins instead of sockets.

Each host is a function from a request to a response. Bytes are counted by link, which the host's role gives:
``controller>engine`` for the bytes of a request to an engine, ``engine>controller`` for those of the answer.
A synchronous request waits in its thread, an asynchronous one in its loop.
"""

import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol
from unittest import mock

import httpx

from grpo_rehearsal.virtual.scheduler import Scheduler


class Host(Protocol):
    """A stand-in that answers requests."""

    role: str

    def handle(self, request: httpx.Request) -> "Answer":
        """Return the answer at once; it says itself when it is complete. Raises httpx.ConnectError."""


@dataclass(slots=True)
class Answer:
    """Response of a stand-in. ``seconds``: after which it comes; ``stream``: source of a streamed body.

    ``then``: called when the seconds are over, it returns the body; it may change the stand-in's state.
    """

    status: int = 200
    body: bytes = b""
    seconds: float = 0.0
    then: Callable[[], bytes] | None = None
    stream: "Stream | None" = None


class Stream(Protocol):
    """Chunks of a body that come over time."""

    def chunks(self, limit: float | None) -> AsyncIterator[bytes]:
        """Yield the chunks; at most ``limit`` seconds pass between two of them."""

    def whole(self, scheduler: Scheduler, limit: float | None) -> bytes:
        """Wait in the calling thread for all chunks, and return them."""

    def close(self) -> None:
        """The client is gone."""


@dataclass(slots=True)
class Waited:
    """Longest wait under a limit. ``limit``, ``seconds``: of the wait that came closest to its limit."""

    limit: float
    seconds: float


@dataclass(slots=True)
class Network:
    """Hosts by (address, port), addresses by name, bytes by link, and how long requests waited."""

    scheduler: Scheduler
    hosts: dict[tuple[str, int], Host] = field(default_factory=dict)
    names: dict[str, Callable[[], list[str]]] = field(default_factory=dict)
    bytes_by_link: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    waits: dict[str, Waited] = field(default_factory=dict)
    silence: float = 0.0  # longest time between two parts of a stream, or before its first

    def resolve(self, name: str) -> list[str]:
        """Return the addresses of a name. Raises socket.gaierror for an unknown one."""
        if name not in self.names:
            raise socket.gaierror(f"unknown name {name}")
        return self.names[name]()

    def begin(self, request: httpx.Request) -> tuple[Host, Answer]:
        """Deliver a request; return its host and the answer."""
        host = self.hosts.get((request.url.host, request.url.port or 80))
        if host is None:
            raise httpx.ConnectError(f"no host {request.url.host}:{request.url.port}", request=request)
        size = len(request.content)
        self.bytes_by_link[f"controller>{host.role}"] += size
        self.requests[f"{host.role}{request.url.path}"] += 1
        return host, host.handle(request)

    def received(self, host: Host, data: bytes) -> None:
        self.bytes_by_link[f"{host.role}>controller"] += len(data)

    def waited(self, what: str, limit: float | None, seconds: float) -> None:
        """Note a wait with a limit; the one with the smallest margin is kept."""
        if limit is None:
            return
        known = self.waits.get(what)
        if known is None or limit - seconds < known.limit - known.seconds:
            self.waits[what] = Waited(limit, seconds)


class SyncTransport(httpx.BaseTransport):
    """Transport of synchronous clients."""

    def __init__(self, network: Network) -> None:
        self._network = network

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        network = self._network
        with network.scheduler.standing_in():
            request.read()
            host, answer = network.begin(request)
        began, limit = network.scheduler.now, _limit(request)
        if answer.stream is not None:
            body = answer.stream.whole(network.scheduler, limit)
        else:
            _sleep_within(network, answer, limit, request)
            body = answer.then() if answer.then else answer.body
        network.waited(f"{host.role}{request.url.path}", limit, network.scheduler.now - began)
        network.received(host, body)
        return httpx.Response(answer.status, content=body, request=request)


class AsyncTransport(httpx.AsyncBaseTransport):
    """Transport of asynchronous clients, with streamed bodies."""

    def __init__(self, network: Network) -> None:
        self._network = network

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        import asyncio

        network = self._network
        with network.scheduler.standing_in():
            await request.aread()
            host, answer = network.begin(request)
        if answer.stream is not None:
            return httpx.Response(
                answer.status,
                headers={"content-type": "text/event-stream; charset=utf-8"},
                stream=_CountedStream(network, host, answer.stream, request),
                request=request,
            )
        limit = _limit(request)
        if limit is not None and answer.seconds > limit:
            await asyncio.sleep(limit)
            raise httpx.ReadTimeout("the answer is late", request=request)
        await asyncio.sleep(answer.seconds)
        body = answer.then() if answer.then else answer.body
        network.received(host, body)
        network.waited(f"{host.role}{request.url.path}", limit, answer.seconds)
        return httpx.Response(answer.status, content=body, request=request)


class _CountedStream(httpx.AsyncByteStream):
    """Streamed body whose bytes and longest silence are noted."""

    def __init__(self, network: Network, host: Host, stream: Stream, request: httpx.Request) -> None:
        self._network, self._host, self._stream = network, host, stream
        self._what, self._limit = f"{host.role}{request.url.path}", _limit(request)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        network = self._network
        last = network.scheduler.now
        try:
            async for chunk in self._stream.chunks(self._limit):
                silence, last = network.scheduler.now - last, network.scheduler.now
                network.silence = max(network.silence, silence)
                network.waited(self._what, self._limit, silence)
                network.received(self._host, chunk)
                yield chunk
        except httpx.ReadTimeout:
            network.waited(self._what, self._limit, network.scheduler.now - last)
            raise

    async def aclose(self) -> None:
        self._stream.close()


def _limit(request: httpx.Request) -> float | None:
    limit = request.extensions.get("timeout", {}).get("read")
    return None if limit is None else float(limit)


def _sleep_within(network: Network, answer: Answer, limit: float | None, request: httpx.Request) -> None:
    if limit is not None and answer.seconds > limit:
        network.scheduler.sleep(limit)
        raise httpx.ReadTimeout("the answer is late", request=request)
    network.scheduler.sleep(answer.seconds)


@contextmanager
def reachable(network: Network) -> Iterator[None]:
    """Send every request of httpx, and every look-up of a name, to the network while the context is open."""

    def getaddrinfo(host: Any, port: Any, *_: Any, **__: Any) -> list[Any]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in network.resolve(str(host))]

    sync, asynchronous = SyncTransport(network), AsyncTransport(network)
    with ExitStack() as stack:
        for owner, attribute, replacement in (
            (httpx.HTTPTransport, "handle_request", lambda _, request: sync.handle_request(request)),
            (
                httpx.AsyncHTTPTransport,
                "handle_async_request",
                lambda _, request: asynchronous.handle_async_request(request),
            ),
            (socket, "getaddrinfo", getaddrinfo),
        ):
            stack.enter_context(mock.patch.object(owner, attribute, replacement))
        yield
