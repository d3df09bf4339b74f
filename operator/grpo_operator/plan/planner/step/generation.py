"""Seconds to generate the responses of a step (pure): continuous batching, event by event."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_operator.plan.planner.step.decode import Engine
from grpo_operator.plan.planner.step.lengths import ResponseLengths


@dataclass(frozen=True, slots=True)
class Generation:
    """``prefill``, ``decode``, ``tail``: seconds. The tail begins when the last sequence has got a place.

    ``running``: largest number of sequences of one attention replica at once. ``samples``: of one replica.
    """

    prefill: float
    decode: float
    tail: float
    running: int
    samples: int

    @property
    def total(self) -> float:
        return self.prefill + self.decode + self.tail


def generation(
    engine: Engine, lengths: ResponseLengths, prompt: float, samples: int, room: int
) -> Generation:
    """Return the seconds in which one attention replica generates ``samples`` responses.

    ``prompt``: mean tokens of a prompt. ``room``: sequences that run at once, by maxRunningRequests and by
    the KV cache. Raises ValueError without room.
    """
    if room < 1:
        raise ValueError(f"room={room}: no sequence fits in the KV cache")
    running = min(room, samples)
    decode, tail = _decode(engine, _spread(lengths.sample(max(samples, 1))), prompt, running)
    return Generation(engine.prefill_seconds(samples * prompt, prompt), decode, tail, running, samples)


def _spread(lengths: Sequence[float]) -> list[float]:
    """Return the lengths in an order without trend, as prompts arrive; nothing is drawn."""
    step = next(step for step in (617, 619, 1) if len(lengths) % step or step == 1)
    return [lengths[i * step % len(lengths)] for i in range(len(lengths))]


def _decode(engine: Engine, lengths: Sequence[float], prompt: float, room: int) -> tuple[float, float]:
    """Return the seconds until the last sequence has a place, and from then to the last token.

    ``clock`` counts the tokens that a sequence has got since the start; the heap holds (end, begin) of the
    running sequences on this clock.
    """
    running = [(length, 0.0) for length in lengths[:room]]
    heapq.heapify(running)
    waiting = list(reversed(lengths[room:]))
    clock = full = tail = begins = 0.0
    while running:
        end, begin = running[0]
        tokens, count = end - clock, len(running)
        # On average a sequence has its prompt and the tokens since its begin.
        context = prompt + clock + tokens / 2 - begins / count
        seconds = tokens * engine.decode_seconds(count, context)
        full, tail = (full + seconds, tail) if waiting else (full, tail + seconds)
        clock, begins = end, begins - begin
        if waiting:
            heapq.heapreplace(running, (clock + waiting.pop(), clock))
            begins += clock
        else:
            heapq.heappop(running)
    return full, tail
