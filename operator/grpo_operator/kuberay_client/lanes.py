"""Threads for synchronous calls in lanes: calls that hang in one lane delay no other lane."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import WeakValueDictionary

_T = TypeVar("_T")
LANE = 8  # calls at once in one lane
THREADS = 256  # calls at once in all lanes; threads are started as they are needed


class Lanes:
    """Lanes by name. They share no thread with asyncio's default executor, which resolves host names."""

    def __init__(self, limit: int = LANE, threads: int = THREADS) -> None:
        self._limit = limit
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="api-call")
        self._lanes: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def call(self, lane: str, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function in a thread once its lane has room."""
        room = self._lanes.setdefault(lane, asyncio.Semaphore(self._limit))  # kept alive by its callers
        async with room:
            return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)
