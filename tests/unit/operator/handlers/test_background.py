"""Background tasks that fail, on virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import islice

import pytest
from kubernetes.client import ApiException
from urllib3.exceptions import ProtocolError

from grpo_operator.handlers.background import ERRORS, HEALTHY_SECONDS, Pauses, keep_running, succeeds
from support.virtual_loop import VirtualLoop


def _run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await scenario()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def test_pauses_grow_never_end_and_start_again_for_each_request() -> None:
    pauses = Pauses()
    assert list(islice(pauses, 7)) == [1, 2, 4, 8, 16, 30, 30] and next(iter(pauses)) == 1


@pytest.mark.parametrize("error", [ApiException(500), ProtocolError("cut"), ValueError("no JSON")])
def test_every_error_is_counted_and_retried(error: Exception) -> None:
    async def scenario() -> None:
        times: list[float] = []

        async def fails() -> None:
            times.append(asyncio.get_running_loop().time())
            raise error

        before = ERRORS.labels("a test")._value.get()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(keep_running("a test", fails), 40)
        assert times == [0, 1, 3, 7, 15, 31]
        assert ERRORS.labels("a test")._value.get() - before == 6

    _run(scenario)


def test_a_task_that_ran_well_begins_with_the_shortest_pause_again() -> None:
    async def scenario() -> None:
        runs: list[float] = []

        async def fails_late() -> None:
            runs.append(asyncio.get_running_loop().time())
            await asyncio.sleep(1 if len(runs) < 4 else HEALTHY_SECONDS + 1)
            raise KeyError("metadata")

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(keep_running("a test", fails_late), 700)
        assert runs == [0, 2, 5, 10, 10 + HEALTHY_SECONDS + 2, 10 + 2 * (HEALTHY_SECONDS + 2)]

    _run(scenario)


def test_what_no_retry_heals_ends_the_task() -> None:
    async def scenario() -> None:
        async def exhausted() -> None:
            raise MemoryError

        with pytest.raises(MemoryError):
            await keep_running("a test", exhausted)
        with pytest.raises(MemoryError):
            await succeeds("a test", exhausted)

    _run(scenario)
