"""Calls for owners in a periodic round: an owner whose calls hang delays the round by seconds at most."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from grpo_operator.api.names import Owner
from grpo_operator.handlers.background import succeeds

PATIENCE_SECONDS = 5.0


class OwnerCalls:
    """Calls of one purpose, at most one at a time for each owner. ``task``: names them in log and metrics."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._running: dict[Owner, asyncio.Task[bool]] = {}

    async def run(self, calls: Mapping[Owner, Callable[[], Awaitable[None]]]) -> None:
        """Start the calls of owners that have none running, and wait PATIENCE_SECONDS for their end."""
        started = {
            owner: asyncio.create_task(succeeds(self._task, call))
            for owner, call in calls.items()
            if owner not in self._running
        }
        self._running |= started
        for owner, task in started.items():
            task.add_done_callback(partial(self._done, owner))
        if started:
            await asyncio.wait(started.values(), timeout=PATIENCE_SECONDS)

    def _done(self, owner: Owner, _: asyncio.Task[bool]) -> None:
        del self._running[owner]
