"""Body of one request to a stand-in engine, read by an event loop or by a waiting thread."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import httpx

from grpo_rehearsal.virtual.scheduler import Scheduler, Waiter


class ChunkStream:
    """Server-sent events of a streamed response, or all responses of a request as one JSON value."""

    def __init__(
        self, streamed: bool, several: bool, responses: int, gone: Callable[["ChunkStream"], None]
    ) -> None:
        """``several``: the request has a list of prompts. ``gone``: called when the client is gone early."""
        self._streamed, self._several, self._missing = streamed, several, responses
        self._gone = gone
        self._chunks: deque[bytes] = deque()
        self._texts: dict[int, str] = {}
        self._failed = self._complete = False
        self._wanted: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._waiter: Waiter | None = None

    def put(self, text: str, finished: bool, index: int | None) -> None:
        """Add one output of the server: a JSON object. ``index``: of the prompt among several."""
        self._missing -= finished
        self._complete = self._missing == 0
        if self._streamed:
            if index is not None:
                text = f'{{"index":{index},{text[1:]}'
            self._chunks.append(f"data: {text}\n\n".encode())
            if self._complete:
                self._chunks.append(b"data: [DONE]\n\n")
        elif finished:
            self._texts[index or 0] = text
            if self._complete:
                whole = ",".join(self._texts[number] for number in sorted(self._texts))
                self._chunks.append((f"[{whole}]" if self._several else whole).encode())
        if self._streamed or self._complete:
            self._notify()

    def fail(self) -> None:
        """Break the connection."""
        self._failed = True
        self._notify()

    def close(self) -> None:
        """The client has read enough."""
        if not self._complete and not self._failed:
            self._failed = True
            self._gone(self)

    async def chunks(self, limit: float | None) -> AsyncIterator[bytes]:
        """Yield the parts of the body as they come.

        Raises httpx.ReadError when the connection breaks, httpx.ReadTimeout ``limit`` seconds after a part.
        """
        while True:
            while self._chunks:
                yield self._chunks.popleft()
            if self._complete:
                return
            if self._failed:
                raise httpx.ReadError("the connection was lost")
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            self._wanted = (loop, future)
            # A handle of the loop costs less than asyncio.timeout, and there are thousands of streams.
            timer = None if limit is None else loop.call_later(limit, _expire, future)
            try:
                await future
            finally:
                if timer is not None:
                    timer.cancel()

    def whole(self, scheduler: Scheduler, limit: float | None) -> bytes:
        """Wait in the calling thread for the whole body. Raises httpx.ReadError and httpx.ReadTimeout."""
        while not self._complete:
            if self._failed:
                raise httpx.ReadError("the connection was lost")
            self._waiter = scheduler.waiter()
            if not scheduler.wait(self._waiter, limit, "answer of an engine"):
                self.close()
                raise httpx.ReadTimeout("no answer")
        return b"".join(self._chunks)

    def _notify(self) -> None:
        if self._wanted is not None:
            (loop, future), self._wanted = self._wanted, None
            loop.call_soon_threadsafe(_resolve, future)
        if self._waiter is not None and not self._waiter.released:
            self._waiter.release()


def _expire(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_exception(httpx.ReadTimeout("no news"))


def _resolve(future: "asyncio.Future[None]") -> None:
    if not future.done():
        future.set_result(None)
