"""Writers of checkpoints in threads of the ranks; forking a Ray actor is not safe."""

import itertools
from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncCaller,
    AsyncCallsQueue,
    AsyncRequest,
)

from grpo_worker.common.store_path import StorePath
from grpo_worker.megatron.checkpoint.draft import await_folder
from grpo_worker.profiling.background import join, start

_NUMBERS = itertools.count()  # of the queues of this process; ranks make theirs in the same order


class _Writer(AsyncCaller):  # type: ignore[misc]
    """Writer of one checkpoint.

    ``key``: names it, the same on all ranks. ``first``: writes other files into the folder, before the state.
    """

    def __init__(self, folder: StorePath, key: str, first: Callable[[], None] | None) -> None:
        self._folder, self._key, self._first = folder, key, first
        self._work: Future[None] | None = None
        self.problem: BaseException | None = None  # why the state was not written

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Copy this rank's state, and start to write it to the folder, as soon as that exists."""
        arguments: list[Any] = list(async_req.async_fn_args)
        if async_req.preload_fn:
            buckets = async_req.preload_fn()  # of Megatron-Core's folder, which is a draft
            arguments[1] = [(self._file(name), name, data) for _, name, data in buckets]

        def write() -> None:
            try:
                await_folder(self._folder, self._key)
            except OSError as error:
                self.problem = error
                if async_req.async_fn is not None:
                    arguments[2].put(error)  # the results, which Megatron-Core checks on all ranks
                return
            if self._first is not None:
                self._first()
            if async_req.async_fn is not None:  # else this rank has no state to write
                async_req.async_fn(*arguments, **async_req.async_fn_kwargs)
                # Megatron-Core tells the other ranks what the results are, but of errors only the text.
                self.problem = next((r for r in list(arguments[2].queue) if isinstance(r, Exception)), None)

        self._work = start(write, "checkpoint")

    def _file(self, name: str) -> "str | StorePath":
        file = self._folder / name
        return str(file) if isinstance(file, Path) else file

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        if blocking and self._work is not None:
            join(self._work)
        alive = int(self._work is not None and not self._work.done())
        return bool(not alive if no_dist else self.sync_all_async_calls(alive))

    def close(self, abort: bool = False) -> None:
        if self._work is not None and not abort:
            wait([self._work])

    def __del__(self) -> None:
        pass


class WriterQueue(AsyncCallsQueue):  # type: ignore[misc]
    """Checkpoints that are being written, the oldest first."""

    def __init__(self) -> None:
        super().__init__()
        self._number = next(_NUMBERS)
        self._writer: _Writer | None = None  # of the newest checkpoint

    @property
    def problem(self) -> BaseException | None:
        """Why this rank has not written its part of the newest checkpoint; None: it has, or still writes."""
        return self._writer.problem if self._writer is not None else None

    def write(self, request: AsyncRequest, folder: StorePath, first: Callable[[], None] | None) -> None:
        """Copy this rank's state and start to write it to a folder of the store. Collective.

        ``first``: called by the writer, before it writes the state.
        """
        self._folder, self._first = folder, first
        self.schedule_async_request(request)

    def _get_async_caller(self) -> AsyncCaller:
        self._writer = _Writer(self._folder, f"checkpoint/{self._number}/{self.call_idx}", self._first)
        return self._writer
