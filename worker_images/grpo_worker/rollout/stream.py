"""Reader of SGLang's streamed answers: server-sent events with JSON, each a part of one answer."""

import json
import math
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

_END = b"\n\n"
REFUSED = (400, 422)


class RequestRefusedError(ValueError):
    """An engine rejected the request as invalid; other engines would reject it too."""


class AbortedError(ValueError):
    """The engine ended the answer before its end, for a reason of its own."""


class BusyError(AbortedError):
    """The engine's queue is full."""


class EngineFailedError(ValueError):
    """The engine reports an internal error (HTTP 5xx)."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Part of an answer.

    ``start``: position of the first of ``ids`` in the answer. It is 0 in every chunk of a server without
    ``--incremental-streaming-output``, which sends the whole answer again each time. ``meta``: meta_info.
    """

    start: int
    ids: list[int]
    log_probs: list[float]
    finished: bool
    meta: Mapping[str, Any]


async def chunks(data: AsyncIterable[bytes]) -> AsyncIterator[Chunk]:
    """Return the chunks of a response's body.

    Raises RequestRefusedError, AbortedError or EngineFailedError for an answer that the engine gives up, and
    ValueError for data that is no answer of SGLang.
    """
    async for event in _events(data):
        if event != b"[DONE]":
            yield chunk_of(json.loads(event))


def chunk_of(answer: Mapping[str, Any]) -> Chunk:
    """Convert one event; errors as in ``chunks``."""
    if "error" in answer:
        _raise(answer["error"].get("code"), str(answer["error"].get("message")))
    meta = answer["meta_info"]
    reason = meta["finish_reason"]
    if reason is not None and reason["type"] == "abort":
        _raise(reason.get("status_code"), str(reason.get("message")))
    ids = [int(token) for token in answer["output_ids"]]
    # JSON has no NaN: SGLang writes null. The trainer names the engine of such a sample.
    values = [entry[0] for entry in meta["output_token_logprobs"]]
    log_probs = [math.nan if value is None else float(value) for value in values]
    if len(ids) != len(log_probs):
        raise ValueError(f"{len(log_probs)} log-probabilities for {len(ids)} tokens")
    total = int(meta.get("completion_tokens", len(ids)))
    return Chunk(max(0, total - len(ids)), ids, log_probs, reason is not None, meta)


def _raise(status: Any, message: str) -> None:
    """Raise the error of an answer that ended with this HTTP status, or with none."""
    if status in REFUSED:
        raise RequestRefusedError(f"HTTP {status}: {message[:500]}")
    if status == 503:
        raise BusyError(f"busy: {message[:500]}")
    if isinstance(status, int) and status >= 500:
        raise EngineFailedError(f"HTTP {status}: {message[:500]}")
    raise AbortedError(f"aborted: {message[:500]}")


async def _events(data: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Split a body into the data of its events; an event may be many megabytes long."""
    buffer, searched = bytearray(), 0
    async for part in data:
        buffer += part
        while (end := buffer.find(_END, searched)) >= 0:
            event = bytes(buffer[:end])
            del buffer[: end + len(_END)]
            searched = 0
            yield event.removeprefix(b"data:").strip()
        searched = max(0, len(buffer) - 1)
