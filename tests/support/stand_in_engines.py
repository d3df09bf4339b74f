"""Stand-ins of SGLang servers behind an httpx transport: /generate as a stream, and /v1/loads.

An answer's tokens depend on (seed, position) alone, as with SGLang's seeded sampling.
"""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

END = 1  # token that ends an answer


def token(seed: int, position: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=4).digest()
    return 10 + int.from_bytes(digest, "little") % 1000


def log_prob(token_id: int) -> float:
    return -token_id / 1024


@dataclass(eq=False)
class StandInEngine:
    """One server. Fields may be changed while it runs.

    ``seconds``: per token. ``length``: position of the end token in the sequence with this seed.
    ``kv_tokens``: room for sequences. ``refuses``: whether it refuses this prompt. ``poison``: its harm, if
    this sequence does any: "status", "stream" (an error there), "abort", "silence", or "death".
    ``died``: called when the engine dies of that.
    """

    version: int = 1
    seconds: float = 0.05
    max_running: int = 8
    kv_tokens: int = 10**9
    length: Callable[[int], int] = lambda _: 10**9
    refuses: Callable[[list[int]], bool] = lambda _: False
    refuses_in_stream: bool = False
    poison: Callable[[list[int]], str] = lambda _: ""
    died: Callable[[], None] = lambda: None
    incremental: bool = True
    alive: bool = True
    silent: bool = False
    status: int = 200
    running: int = 0
    waiting: int = 0
    used: int = 0
    most_waiting: int = 0
    tokens_sent: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    forgets: set[int] = field(default_factory=set)  # numbers of requests that it forgets after a token
    aborts: set[int] = field(default_factory=set)  # ends the request with this number early, once
    _load: dict[str, Any] = field(default_factory=dict)

    def load(self) -> dict[str, Any]:
        """Return the load that the scheduler reported last; one that is silent reports none."""
        if not self.silent:
            self._load = self._own_load()
        return self._load

    def _own_load(self) -> dict[str, Any]:
        return {
            "dp_rank": 0,
            "num_running_reqs": self.running,
            "num_waiting_reqs": self.waiting,
            "num_used_tokens": self.used,
            "max_total_num_tokens": self.kv_tokens,
            "max_running_requests": self.max_running,
        }

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[bytes]:
        number = len(self.requests)
        self.requests.append(body)
        ids, params = body["input_ids"], body["sampling_params"]
        if self.refuses(ids):
            yield _event({"error": {"message": "too long", "code": 400}})
            return
        self.waiting += 1
        self.most_waiting = max(self.most_waiting, self.waiting)
        try:
            while self.running >= self.max_running or self.used + len(ids) > self.kv_tokens:
                await self._pause()
        finally:
            self.waiting -= 1
        self.running += 1
        self.used += len(ids)
        held = len(ids)
        try:
            answer: list[int] = []
            sent = 0
            while True:
                await self._pause()
                harm = self._harm([*ids, *answer])
                if harm == "stream":
                    yield _event({"error": {"message": "crashed", "code": 500}})
                    return
                if number in self.aborts or harm == "abort":
                    self.aborts.discard(number)
                    yield _event(_chunk(answer[sent:], answer, "abort", self.version))
                    return
                if number in self.forgets and answer:
                    self.running, self.used, held = self.running - 1, self.used - held, 0
                    await asyncio.sleep(10**9)
                answer.append(self._next(params["sampling_seed"], len(ids) + len(answer)))
                held += 1
                self.used += 1
                over = answer[-1] in params["stop_token_ids"]
                finished = "stop" if over else "length" if len(answer) >= params["max_new_tokens"] else None
                if finished or sent == 0 or len(answer) - sent >= params["stream_interval"]:
                    part = answer[sent:] if self.incremental else answer
                    self.tokens_sent += len(part)
                    yield _event(_chunk(part, answer, finished, self.version))
                    sent = len(answer)
                if finished:
                    yield b"data: [DONE]\n\n"
                    return
        finally:
            self.running -= held > 0
            self.used -= held

    def _next(self, seed: int, position: int) -> int:
        return END if position >= self.length(seed) else token(seed, position)

    def _harm(self, ids: list[int]) -> str:
        harm = self.poison(ids)
        if harm == "silence":
            self.silent = True
        if harm == "death":
            self.alive = False
            self.died()
            raise httpx.ReadError("the engine died")
        return harm

    async def _pause(self) -> None:
        await asyncio.sleep(self.seconds)
        while self.silent:  # noqa: ASYNC110 - a test changes the field
            await asyncio.sleep(1.0)
        if not self.alive:
            raise httpx.ReadError("the engine died")


def _chunk(part: list[int], answer: list[int], finished: str | None, version: int) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "finish_reason": {"type": finished, "message": "test"} if finished else None,
        "output_token_logprobs": [[log_prob(token_id), token_id, None] for token_id in part],
        "completion_tokens": len(answer),
        "weight_version": str(version),
    }
    if finished:
        meta["weight_versions"] = [{"version": str(version), "start": 0, "end": len(answer)}]
    return {"output_ids": part, "meta_info": meta}


def _event(answer: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(answer).encode() + b"\n\n"


class StandInEngines(httpx.AsyncBaseTransport):
    """Transport to engines by host name."""

    def __init__(self, engines: dict[str, StandInEngine]) -> None:
        self.engines = engines
        self.open = 0  # streams
        self.most_open = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        engine = self.engines[request.url.host]
        if not engine.alive:
            raise httpx.ConnectError("connection refused")
        if request.url.path == "/v1/loads":
            return httpx.Response(200, json={"loads": [engine.load()]})
        body = json.loads(request.content)
        if engine.poison(body["input_ids"]) == "status":
            engine.requests.append(body)
            return httpx.Response(500, json={"error": {"message": "crashed"}})
        if engine.status != 200 or (engine.refuses(body["input_ids"]) and not engine.refuses_in_stream):
            status = engine.status if engine.status != 200 else 400
            engine.requests.append(body)
            return httpx.Response(status, json={"error": {"message": "too long"}})
        return httpx.Response(200, stream=_Body(self, engine.generate(body)))


class _Body(httpx.AsyncByteStream):
    def __init__(self, transport: StandInEngines, parts: AsyncIterator[bytes]) -> None:
        self._transport, self._parts = transport, parts
        transport.open += 1
        transport.most_open = max(transport.most_open, transport.open)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._parts:
            yield part

    async def aclose(self) -> None:
        self._transport.open -= 1
        await self._parts.aclose()  # type: ignore[attr-defined]
