"""Processes of ranks that compute nothing: on virtual time they progress, hang, freeze or die as scripted."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from grpo_worker.profiling.hang import Position
from grpo_worker.profiling.progress import Progress
from grpo_worker.roles.dispatch import Dispatch, RankInfo, register
from grpo_worker.roles.host import RankHost
from support.clocks import FakeClock


class Methods:
    """The registered methods that a gang of stand-ins has; nothing of them runs."""

    @register(Dispatch.ONE_TO_ALL)
    def work(self) -> None: ...

    @register(Dispatch.RANK_ZERO)
    def first(self) -> None: ...


@dataclass(eq=False)
class Call:
    """A call that ends at a virtual time."""

    index: int
    method: str
    ends: float
    value: Any = None
    error: Exception | None = None


@dataclass
class StandInProcesses:
    """``seconds``: duration of a call of the compute thread, by process and method. ``count_at``: progress of
    a process at a virtual time. ``frozen``: processes that answer nothing. ``asked``: number of asks by
    method.
    """

    clock: FakeClock
    count: int
    seconds: Callable[[int, str], float] = lambda _index, _method: 0.0
    count_at: Callable[[int, float], int] = lambda _index, _time: 0
    frozen: set[int] = field(default_factory=set)
    work: str = "forward passes"
    allowance: float = 0.0
    reads: bool = False  # a store is being read
    errors: dict[int, Exception] = field(default_factory=dict)  # that calls of ``work`` raise, by process
    died: "Future[None]" = field(default_factory=Future)
    leaving: "Future[int]" = field(default_factory=Future)
    asked: dict[str, int] = field(default_factory=dict)
    stored: int = 0
    killed: bool = False
    _dead: set[int] = field(default_factory=set)

    def die(self, *indices: int) -> None:
        self._dead |= set(indices)
        if not self.died.done():
            self.died.set_result(None)

    def put(self, value: Any) -> Any:
        self.stored += 1
        return value

    def pass_on(self, index: int, stored: Any) -> Any:
        return stored

    def call(self, index: int, method: str, *args: Any) -> Call:
        ends = math.inf if index in self.frozen else self.clock.now() + self.seconds(index, method)
        value: Any = None
        if method == "node":
            value = RankHost(f"10.0.1{index // 8:02}.1", 100 + index, f"trainer-{index // 8}")
        elif method == "start":
            value = RankInfo(index, 0, 0, 0, index, 1, self.count)
        elif method == "listen":
            value = 29500
        return Call(index, method, ends, value, self.errors.get(index) if method == "work" else None)

    def beside(self, index: int, method: str, *args: Any) -> Call:
        return self.call(index, method, *args)

    def ask(self, index: int, method: str, *args: Any) -> Call:
        self.asked[method] = self.asked.get(method, 0) + 1
        value: Any = None
        if method == "progress":
            value = Progress(self.count_at(index, self.clock.now()), self.work, self.allowance)
        elif method == "position":
            count = self.count_at(index, self.clock.now())
            where = ("runner.py:200 run",) if count else ("loader.py:7 wait_for_something",)
            value = Position(index, {"0 all": count}, where, self.work, {self.work: count}, self.reads)
        return Call(index, method, math.inf if index in self.frozen else self.clock.now(), value)

    def wait(self, calls: Sequence[Call], count: int, seconds: float) -> tuple[list[Call], list[Call]]:
        """Advance the clock until ``count`` calls have ended, at most by ``seconds``."""
        ends = sorted(self._end(call) for call in calls)[:count]
        self.clock.time = max(self.clock.time, min(ends[-1], self.clock.time + seconds))
        done = [call for call in calls if self._end(call) <= self.clock.time][:count]
        ended = set(done)
        return done, [call for call in calls if call not in ended]

    def _end(self, call: Call) -> float:
        return self.clock.time if call.index in self._dead else call.ends

    def error(self, call: Call) -> Exception | None:
        return RuntimeError("the process has died") if call.index in self._dead else call.error

    def result(self, call: Call) -> Any:
        return call.value

    def dead(self) -> list[int]:
        return sorted(self._dead)

    def kill(self) -> None:
        self.killed = True
