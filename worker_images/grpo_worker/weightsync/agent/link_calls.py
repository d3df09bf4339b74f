"""Calls to the engine about its link: they take as long as its members make progress, or until given up.

The engine's ranks limit their waits themselves. Here only a server that does not answer ends a call.
"""

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from grpo_worker.weightsync.agent.engine_client import Engine, EngineError

T = TypeVar("T")


class LinkCalls:
    """Runs one call at a time; another thread can end the wait for an engine that does not answer."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._current: tuple[str, Future[None]] = "", Future()  # link, and the end of the wait

    def run(self, link: str, call: Callable[[], T]) -> T:
        """Return the result of ``call``, which waits for the engine's ranks without a limit.

        Raises its error. Raises EngineError after ``give_up``, and when the server does not answer a ping,
        which it gets after each timeout of a call: the engine is silent from then on.
        """
        given_up: Future[None] = Future()
        with self._lock:
            self._current = link, given_up
        thread = ThreadPoolExecutor(1)
        answer = thread.submit(call)
        thread.shutdown(wait=False)  # a call that is given up ends with the engine's process
        ends: tuple[Future[Any], ...] = (answer, given_up)
        problem = "the transfer has ended, and the engine does not answer"
        while not wait(ends, self._engine.timeout, FIRST_COMPLETED).done:
            if not self._engine.alive():
                problem = "Timeout: the engine's server does not answer"
                break
        if not answer.done():
            self._engine.on_silent()
            raise EngineError(f"{link}: {problem}")
        return answer.result()

    def give_up(self, link: str) -> None:
        """End the wait of a call about ``link``, if there is one. Thread-safe."""
        with self._lock:
            current, given_up = self._current
            if current == link and not given_up.done():
                given_up.set_result(None)
