"""Time that a rank computes itself: the time of a phase without the waiting for others in collectives.

In a gang all ranks take equally long, because each waits for the slowest one in the next collective. What
tells them apart is how long they waited. Megatron-Core's StragglerDetector brackets each forward step with
CUDA events and host timers and counts the longer of the two, so that what waits within the step, for ranks of
the same tensor, expert or context group, still counts as work. Here the waits are measured and subtracted.

A wait is bracketed where the computing stream waits: by events of that stream on GPUs, so that the host goes
on, and by the host's clock otherwise. A collective that runs beside the computation costs only what the
computation waits for it in the end.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import ProcessGroup, Work

_MOST_PENDING = 4096  # pairs of events that are kept before the oldest are read
# Methods of a process group that may wait on the computing stream, and the one of a handle that does.
_COLLECTIVES = (
    "_allgather_base", "_end_coalescing", "_reduce_scatter_base", "all_gather_single",
    "all_gather_single_coalesced", "all_to_all_single", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base",
    "barrier", "broadcast", "gather", "gather_into_tensor", "gather_single", "recv", "recv_anysource",
    "reduce", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip
_WAIT = "wait"


@dataclass(frozen=True, slots=True)
class OwnTime:
    """Seconds that a rank computed itself: in passes without gradients, and in updates."""

    log_probs: float = 0.0
    update: float = 0.0


class Stopwatch(Protocol):
    """Measures pieces of time that may overlap. ``Mark``: a moment."""

    def mark(self) -> Any:
        """Return this moment."""

    def counts_here(self) -> bool:
        """Return whether a wait of the calling thread delays the computation."""

    def add(self, begin: Any, end: Any, sign: int) -> None:
        """Add, or with ``sign`` -1 subtract, the time between two moments."""

    def take(self) -> float:
        """Return the sum in seconds, and begin again at 0."""


class HostStopwatch:
    """Stopwatch of the host's clock: collectives of gloo block the thread that computes."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now, self._sum = now, 0.0

    def mark(self) -> float:
        return self._now()

    def counts_here(self) -> bool:
        return True

    def add(self, begin: float, end: float, sign: int) -> None:
        self._sum += sign * (end - begin)

    def take(self) -> float:
        taken, self._sum = self._sum, 0.0
        return taken


class DeviceStopwatch:
    """Stopwatch of the stream on which this rank computes; it never makes the host wait within a phase."""

    def __init__(self) -> None:
        self._stream = torch.cuda.current_stream()
        self._free: list[torch.cuda.Event] = []
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event, int]] = deque()
        self._sum = 0.0

    def mark(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def counts_here(self) -> bool:
        # On another stream a wait delays only what the computing stream waits for later.
        return bool(torch.cuda.current_stream() == self._stream)

    def add(self, begin: torch.cuda.Event, end: torch.cuda.Event, sign: int) -> None:
        self._pending.append((begin, end, sign))
        while len(self._pending) > _MOST_PENDING:
            self._read()

    def take(self) -> float:
        while self._pending:
            self._read()
        taken, self._sum = self._sum, 0.0
        return taken

    def _read(self) -> None:
        begin, end, sign = self._pending.popleft()
        end.synchronize()
        self._sum += sign * begin.elapsed_time(end) / 1000
        self._free += [begin, end]


class OwnTimeRecord:
    """Own time of this rank, by phase. ``stopwatch``: None until the first phase, which chooses one."""

    def __init__(self, stopwatch: Callable[[], Stopwatch] | None = None) -> None:
        self._make = stopwatch or _stopwatch
        self._watch: Stopwatch | None = None
        self._thread: int | None = None  # that runs a phase now
        self._waits = False  # a wait is being measured: those inside it are a part of it
        self._sums = {"log_probs": 0.0, "update": 0.0}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the time while the context is open, as a part of the phase ``name`` of OwnTime."""
        watch = self._watch = self._watch or self._make()
        begin, self._thread = watch.mark(), threading.get_ident()
        try:
            yield
        finally:
            self._thread = None
            watch.add(begin, watch.mark(), 1)
            self._sums[name] += watch.take()

    def take(self) -> OwnTime:
        """Return the time since the last call."""
        taken = OwnTime(**{name: max(seconds, 0.0) for name, seconds in self._sums.items()})
        self._sums = dict.fromkeys(self._sums, 0.0)
        return taken

    def measured(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``function``, a method of torch that may wait for other ranks, with its time as a wait."""

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            watch = self._watch
            if self._thread is None or watch is None or self._waits or not self._counts(watch):
                return function(*args, **kwargs)
            self._waits, begin = True, watch.mark()
            try:
                return function(*args, **kwargs)
            finally:
                watch.add(begin, watch.mark(), -1)
                self._waits = False

        return call

    def _counts(self, watch: Stopwatch) -> bool:
        # Backward passes on GPUs run in threads of autograd. Other threads are those of writers.
        inside = threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1
        return inside and watch.counts_here()


def _stopwatch() -> Stopwatch:
    return DeviceStopwatch() if torch.cuda.is_available() else HostStopwatch()


def measure_collectives(record: OwnTimeRecord) -> None:
    """Let torch's collectives, which Megatron-Core calls, report their waits to ``record``."""
    for owner, name in [*((ProcessGroup, name) for name in _COLLECTIVES), (Work, _WAIT)]:
        if hasattr(owner, name):  # not every version of torch has all of them
            setattr(owner, name, record.measured(getattr(owner, name)))


OWN_TIME = OwnTimeRecord()
