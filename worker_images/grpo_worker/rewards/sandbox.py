"""Pool of reward processes, which may fail, hang or exhaust memory without harm to the job."""

import contextlib
import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from grpo_worker.rewards.child import Program
from grpo_worker.rewards.process import DeadError, Outcome, RewardProcess

log = logging.getLogger(__name__)


class Sandbox:
    """Pool of ``workers`` processes, each of which judges one answer at a time."""

    def __init__(self, program: Program, workers: int) -> None:
        self._program = program
        self._workers = workers
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="reward")
        self._idle: deque[RewardProcess] = deque()

    def call(self, requests: Sequence[dict[str, Any]], pauses: Sequence[float] = ()) -> list[Outcome]:
        """Judge all requests; return their outcomes in order, with a problem where judging failed.

        ``pauses``: seconds to wait before each retry when no process starts. Raises the DeadError of a
        process when none starts after the last retry.
        """
        work = _Work(requests)
        left_pauses = deque(pauses)
        while work.todo:
            left = len(work.todo)
            threads = [self._threads.submit(self._judge, work) for _ in range(min(self._workers, left))]
            for thread in threads:
                thread.result()
            if len(work.todo) < left:
                left_pauses = deque(pauses)
            elif left_pauses:
                time.sleep(left_pauses.popleft())
            else:
                assert work.problem is not None, "a thread ends early for a problem only"
                raise work.problem
        return [work.done[number] for number in range(len(requests))]

    def _judge(self, work: "_Work") -> None:
        """Judge answers until none is left, or until no process starts for this thread."""
        while work.todo:
            try:
                process = self._process()
            except DeadError as error:
                work.problem = error
                log.warning("reward function: %s", error)
                return
            try:
                number, request = work.todo.popleft()
            except IndexError:  # another thread took the last one
                self._idle.append(process)
                return
            try:
                work.done[number] = process.ask(request)
                self._idle.append(process)
            except DeadError as error:
                process.end()
                work.done[number] = Outcome(0.0, str(error))
                log.warning("reward function: %s", error)

    def _process(self) -> RewardProcess:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return RewardProcess(self._program)


class _Work:
    """Requests of one call and their outcomes."""

    def __init__(self, requests: Sequence[dict[str, Any]]) -> None:
        self.todo = deque(enumerate(requests))
        self.done: dict[int, Outcome] = {}
        self.problem: DeadError | None = None
