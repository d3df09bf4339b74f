"""Calls for owners of which some hang, on virtual time."""

import asyncio
from collections.abc import Awaitable, Callable

from grpo_operator.api.names import Owner
from grpo_operator.handlers.owner_calls import PATIENCE_SECONDS, OwnerCalls
from support.virtual_loop import VirtualLoop

SLOW, FAST, BAD = (Owner("GRPOJob", name, "a") for name in ("slow", "fast", "bad"))


def test_a_round_waits_seconds_for_what_hangs_and_starts_it_once() -> None:
    async def scenario() -> None:
        now, made = asyncio.get_running_loop().time, list[Owner]()

        def call(owner: Owner, seconds: float) -> Callable[[], Awaitable[None]]:
            async def run() -> None:
                made.append(owner)
                await asyncio.sleep(seconds)
                if owner == BAD:
                    raise ValueError("no JSON")

            return run

        calls = OwnerCalls("a test")
        due = {SLOW: call(SLOW, 60), FAST: call(FAST, 1), BAD: call(BAD, 0)}
        await calls.run(due)
        assert now() == PATIENCE_SECONDS and made == [SLOW, FAST, BAD]
        await calls.run(due)
        assert now() == PATIENCE_SECONDS + 1 and made == [SLOW, FAST, BAD, FAST, BAD]
        await asyncio.sleep(60)
        await calls.run({SLOW: call(SLOW, 0)})
        assert made[-1] == SLOW

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(scenario())
