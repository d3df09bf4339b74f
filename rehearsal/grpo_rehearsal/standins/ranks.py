"""Stand-in processes of the trainer ranks, behind the interface that the controller's worker group uses.

The controller's own WorkerGroup runs on them: its dispatch, its watch over progress and its errors are real.
Calls that are made at the same moment are one round, which all ranks end together, as collectives make them.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from grpo_rehearsal.standins.object_store import StandInObjectStore, Stored, experts_in, size_of
from grpo_rehearsal.standins.pieces import even
from grpo_rehearsal.standins.rank_methods import RankMethods, Work
from grpo_rehearsal.standins.rank_record import Gap, PoolRecord
from grpo_rehearsal.virtual.scheduler import Scheduler, Timer, Waiter
from grpo_worker.profiling.hang import Position
from grpo_worker.profiling.progress import Progress
from grpo_worker.roles.dispatch import RankInfo


@dataclass(eq=False, slots=True)
class Call:
    """One call of one process."""

    index: int
    method: str
    args: tuple[Any, ...]
    ended: bool = False
    problem: Exception | None = None
    value: Callable[[], Any] | None = None


@dataclass(eq=False, slots=True)
class Round:
    """Calls of the same method at the same moment. ``end``: None until its seconds are known."""

    method: str
    calls: list[Call] = field(default_factory=list)
    begin: float = 0.0
    work: Work = field(default_factory=lambda: Work(even(0.0)))


@dataclass(frozen=True, slots=True)
class Place:
    """Pods of the training pool: the address and the name of each rank's pod."""

    addresses: Sequence[str]
    pods: Sequence[str]


class StandInProcesses:
    """One process for each rank; see grpo_worker.controller.training.processes.RankProcesses."""

    def __init__(
        self, scheduler: Scheduler, methods: RankMethods, infos: Sequence[RankInfo], place: Place,
        host: Callable[[str, int, str], Any], record: PoolRecord,
    ) -> None:  # fmt: skip
        """``infos``: coordinates of each rank. ``host``: makes the answer of ``node``."""
        self.count = len(infos)
        self.died: Future[None] = Future()
        self.leaving: Future[int] = Future()  # no pod of a rehearsal is drained
        self._scheduler, self._methods, self._infos = scheduler, methods, infos
        self._place, self._host, self._record = place, host, record
        self._rank_of = {index: index for index in range(self.count)}  # the worker group numbers the ranks
        self._round: Round | None = None
        self._current: Round | None = None
        self._queue: list[Round] = []
        self._beside: list[Call] = []
        self._finished = 0
        self._progressed = 0  # in finished rounds
        self._dead: set[int] = set()
        self._stuck: tuple[int, float] | None = None  # (rank that hangs, since)
        self._killed = False
        self._store = StandInObjectStore(record.nbytes)
        self._waits: list[tuple[Waiter, set[int], int]] = []
        self._timer: Timer | None = None

    def put(self, value: Any) -> Stored:
        """Store an argument once for all processes."""
        self._record.routed_experts += experts_in(value)
        return self._store.put(value)

    def pass_on(self, index: int, stored: Stored) -> Stored:
        """Copy an argument to the pod of a process."""
        return self._store.pass_on(self._place.pods[index], stored)

    def call(self, index: int, method: str, *args: Any) -> Call:
        """Start a method in the thread that computes."""
        call = Call(index, method, args)
        if self._round is None or self._round.method != method:
            self._round = Round(method)
            self._scheduler.call_later(0, partial(self._close, self._round))
        self._round.calls.append(call)
        return call

    def beside(self, index: int, method: str, *args: Any) -> Call:
        """Start a method in the thread beside the calls; it takes its time, whatever the others do."""
        call = Call(index, method, args)
        values = tuple(_value(arg) for arg in args)
        work = self._methods.work(method, [values], [self._rank_of[index]])
        self._beside.append(call)
        self._scheduler.call_later(work.pieces.seconds, partial(self._end_beside, call, values))
        return call

    def _end_beside(self, call: Call, args: tuple[Any, ...]) -> None:
        if not call.ended:
            call.value = partial(self._result, call.index, call.method, args)
            self._end(call)

    def ask(self, index: int, method: str, *args: Any) -> Call:
        """Start a method in the thread that watches; the answer comes at once, unless the process is gone."""
        call = Call(index, method, args)
        if self._killed or index in self._dead:
            call.ended, call.problem = True, RuntimeError("the process has ended")
        else:
            call.ended, call.value = True, partial(self._answer, index, method)
        return call

    def wait(self, calls: Sequence[Call], count: int, seconds: float) -> tuple[list[Call], list[Call]]:
        """Wait until ``count`` calls have ended, at most ``seconds``; return those ended, and the others."""
        if sum(call.ended for call in calls) < count:
            waiter = self._scheduler.waiter()
            entry = (waiter, {id(call) for call in calls}, count - sum(call.ended for call in calls))
            self._waits.append(entry)
            self._scheduler.wait(waiter, seconds, f"{calls[0].method} of ranks")
            if entry in self._waits:
                self._waits.remove(entry)
        done = [call for call in calls if call.ended]
        return done, [call for call in calls if not call.ended]

    def error(self, call: Call) -> Exception | None:
        return call.problem

    def result(self, call: Call) -> Any:
        """Return the result of a call that has ended without an error."""
        if call.value is None:
            return None
        with self._scheduler.standing_in():
            value = call.value()
        self._record.nbytes["trainer>controller"] += size_of(value)
        self._record.routed_experts += experts_in(value)
        return value

    def dead(self) -> list[int]:
        return sorted(self._dead)

    def kill(self) -> None:
        """End every process."""
        self._killed = True
        if self._timer is not None:
            self._timer.cancel()
        self._end_all_beside(range(self.count))

    def _end_all_beside(self, processes: Collection[int]) -> None:
        for call in self._beside:
            if call.index in processes and not call.ended:
                self._end(call, RuntimeError("the process has ended"))

    def die(self, processes: Sequence[int]) -> None:
        """End some processes, as when their pod is lost. The others wait for them."""
        if self._killed:
            return
        self._dead |= set(processes)
        self._stop_rounds()
        self._end_all_beside(self._dead)
        for current in (self._current, *self._queue):
            for call in current.calls if current else ():
                if call.index in self._dead:
                    self._end(call, RuntimeError("the process has ended"))
        if not self.died.done():
            self.died.set_result(None)

    def hang(self, rank: int) -> None:
        """Make a rank stand still; the others wait for it in their next collective."""
        if not self._killed:
            self._stuck = (rank, self._scheduler.now)
            if self._current is not None:
                self._record.stuck_since = self._scheduler.now
            self._stop_rounds()

    def _stop_rounds(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self, round_: Round) -> None:
        """All calls of a round are made: it begins when the ranks are free."""
        if self._round is round_:
            self._round = None
        if self._killed:
            return
        self._queue.append(round_)
        if self._current is None:
            self._begin_next()

    def _begin_next(self) -> None:
        if not self._queue:
            self._current = None
            return
        self._current = round_ = self._queue.pop(0)
        round_.begin = self._scheduler.now
        if self._stuck is not None and self._record.stuck_since is None:
            self._record.stuck_since = round_.begin
        for call in round_.calls:
            for arg in call.args:
                if isinstance(arg, Stored):
                    self._store.fetch(self._place.pods[call.index], arg)
        args = [tuple(_value(arg) for arg in call.args) for call in round_.calls]
        try:
            ranks = [self._rank_of[call.index] for call in round_.calls]
            round_.work = self._methods.work(round_.method, args, ranks)
        except Exception as error:  # noqa: BLE001 - the caller of the method gets it, as from a real rank
            for call in round_.calls:
                self._end(call, error)
            self._begin_next()
            return
        if self._stuck is None and not self._dead:
            self._timer = self._scheduler.call_later(round_.work.pieces.seconds, self._end_round)

    def _end_round(self) -> None:
        round_ = self._current
        assert round_ is not None, "a round that ends has begun"
        self._timer = None
        self._finished += 1
        self._record.rounds.append((round_.method, round_.begin, self._scheduler.now))
        self._progressed += round_.work.pieces.count
        self._note_gap(round_.method, round_.work)
        for call in round_.calls:
            args = tuple(_value(arg) for arg in call.args)
            call.value = partial(self._result, call.index, round_.method, args)
            self._end(call)
        self._begin_next()

    def _note_gap(self, method: str, work: Work) -> None:
        known, seconds = self._record.gaps.get(method), work.pieces.longest
        if known is None or seconds > known.seconds:
            self._record.gaps[method] = Gap(seconds, work.allowance, work.assumed)

    def _result(self, index: int, method: str, args: tuple[Any, ...]) -> Any:
        if method == "node":
            return self._host(self._place.addresses[index], 1000 + index, self._place.pods[index])
        if method == "start":
            self._rank_of[index] = int(args[0])
            self._methods.attempt = args[-1]["attempt"]
            return self._infos[self._rank_of[index]]
        return self._methods.result(method, self._infos[self._rank_of[index]], args)

    def _end(self, call: Call, problem: Exception | None = None) -> None:
        call.ended, call.problem = True, problem
        for entry in list(self._waits):
            waiter, wanted, missing = entry
            if id(call) in wanted:
                self._waits.remove(entry)
                if missing > 1:
                    self._waits.append((waiter, wanted, missing - 1))
                elif not waiter.released and not waiter.expired:
                    waiter.release()

    def _answer(self, index: int, method: str) -> Any:
        if method == "progress":
            return Progress(self._progress(), self._current.method if self._current else "", self._allowance)
        if method == "position":
            return self._position(index)
        return None

    @property
    def _allowance(self) -> float:
        return self._current.work.allowance if self._current else 0.0

    def _progress(self) -> int:
        round_ = self._current
        if round_ is None:
            return self._progressed
        until = self._scheduler.now if self._stuck is None else self._stuck[1]
        return self._progressed + round_.work.pieces.done(until - round_.begin)

    def _position(self, index: int) -> Position:
        rank = self._rank_of[index]
        behind = self._stuck is not None and self._stuck[0] == rank
        where = ("stand_in.py:1 wait",) if behind else ("distributed_c10d.py:1 all_reduce",)
        return Position(rank, {"default": self._finished + (not behind)}, where)


def infos_of(tensor: int, context: int, data: int, pipeline: int, packed: bool = False) -> list[RankInfo]:
    """Return the coordinates of all ranks in Megatron-Core's order: tensor, context, data, pipeline.

    ``packed``: the job packs sequences.
    """
    sizes = (pipeline, data, context, tensor)
    places = [tuple(int(i) for i in place) for place in np.ndindex(*sizes)]
    return [
        RankInfo(rank, t, p, c, d, pipeline, data, tensor, context, packed)
        for rank, (p, d, c, t) in enumerate(places)
    ]


def _value(arg: Any) -> Any:
    return arg.value if isinstance(arg, Stored) else arg
