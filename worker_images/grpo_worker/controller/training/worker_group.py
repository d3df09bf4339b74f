"""Group of processes, one per rank, that is called like one worker."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from grpo_worker.common.clock import SYSTEM_CLOCK, Clock
from grpo_worker.common.errors import one_line
from grpo_worker.common.ragged_batch import RaggedBatch
from grpo_worker.common.store_problems import store_problem
from grpo_worker.controller.training.processes import RankProcesses
from grpo_worker.controller.training.progress_watch import ProgressWatch, Standstill, poll_seconds
from grpo_worker.profiling.hang import Position, caused_outside, report
from grpo_worker.roles.dispatch import Dispatch, RankInfo, dispatch_mode, reads_of
from grpo_worker.roles.host import RankHost
from grpo_worker.roles.shared_batch import ObjectStore, SharedBatch

log = logging.getLogger(__name__)
_ANSWER_SECONDS = 10.0  # for an answer of the threads that watch
_BESIDE_SECONDS = 60.0  # of one wait for work beside the calls, which is repeated
_OTHERS_SECONDS = 1.0  # for other ranks to fail like the first one
_IMPORT_SECONDS = 300.0  # until a new process can answer: it imports torch from a cold disk


class GangError(RuntimeError):
    """A rank failed, died or hung, so the gang must be restarted.

    ``lost``: ranks that died. ``outside``: the cause is not in the job, such as a frozen process or a store
    that does not answer or is full. ``host``: of the ranks that failed, if they are all in one pod.
    ``since``: time of the first sign of the fault, None if it is unknown.
    """

    def __init__(
        self,
        message: str,
        lost: list[int],
        outside: bool = False,
        host: RankHost | None = None,
        since: float | None = None,
    ) -> None:
        super().__init__(message)
        self.since = since
        self.lost = lost
        self.outside = outside or bool(lost)
        self.host = host


class WorkerGroup:
    """Ranks that are called together.

    A call may take as long as it makes progress. It fails if any rank fails, because the others may be stuck
    in a collective and cannot be used again. It also fails if no rank makes progress for ``hang_seconds``, or
    if a rank's process does not answer for so long; the error then names the ranks that are stuck.
    """

    def __init__(
        self,
        cls: type,
        processes: RankProcesses,
        hang_seconds: float,
        flight_records: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Wait until all processes run, and number the ranks.

        ``cls``: class whose methods the processes have. ``flight_records``: folder for the ranks' flight
        records after a hang.
        """
        self._cls = cls
        self._processes = processes
        self._hang = hang_seconds
        self._flight_records = flight_records
        self._clock = clock
        count = processes.count
        self._order = list(range(count))  # process of each rank
        self.hosts: list[RankHost] = []
        calls = [processes.call(index, "node") for index in range(count)]
        hosts = self._wait(calls, "start of processes", hang_seconds + _IMPORT_SECONDS)
        # Ranks of one node must be consecutive, so that tensor parallelism stays within a node.
        self._order.sort(key=lambda index: (hosts[index].address, index))
        self.hosts = [hosts[index] for index in self._order]
        self.ranks: list[RankInfo] = []
        self._died_at: float | None = None
        processes.died.add_done_callback(self._note_death)
        self._leaving: Future[RankHost] = Future()
        processes.leaving.add_done_callback(self._note_leaving)

    @property
    def addresses(self) -> list[str]:
        """IP address of each rank."""
        return [host.address for host in self.hosts]

    @property
    def pids(self) -> list[int]:
        """Process id of each rank."""
        return [host.pid for host in self.hosts]

    @property
    def died(self) -> "Future[None]":
        """Completed when the first process has ended, also between two calls."""
        return self._processes.died

    @property
    def leaving(self) -> "Future[RankHost]":
        """Completed with the first pod of ranks that is about to end, also between two calls."""
        return self._leaving

    def death(self) -> GangError:
        """Return the error that names the ranks whose processes have ended."""
        lost = self._lost()
        names = ", ".join(f"rank {rank} on {self.hosts[rank]}" for rank in lost[:4])
        more = f" and {len(lost) - 4} more ranks" if len(lost) > 4 else ""
        return GangError(
            f"the processes of {names}{more} have ended",
            lost,
            outside=True,
            host=self._one_host(lost),
            since=self._died_at,
        )

    def start(self, config: dict[str, Any]) -> None:
        """Rendezvous at rank 0 and build the model on every rank."""
        port = self._wait([self._remote(0, "listen")], "listen")[0]
        shared = self._processes.put(config)  # once, however many ranks get it
        world, address = len(self._order), self.hosts[0].address
        calls = [self._remote(rank, "start", rank, world, address, port, shared) for rank in range(world)]
        self.ranks = self._wait(calls, "start")

    def call(self, method: str, *args: Any) -> Any:
        """Call a registered method by its dispatch protocol; the argument of a split batch is SharedRows.

        Raises GangError when any rank fails, and AttributeError for unregistered methods.
        """
        mode = dispatch_mode(getattr(self._cls, method))
        if mode is None:
            raise AttributeError(f"{self._cls.__name__}.{method} is not registered for dispatch")
        if mode is Dispatch.RANK_ZERO:
            return self._wait([self._remote(0, method, *args)], method)[0]
        if mode is Dispatch.ONE_TO_ALL:
            return self.begin(method, *args)()
        rows, reads = args[0], reads_of(getattr(self._cls, method))
        calls = []
        for info in self.ranks:
            columns, stored = rows.arguments(info, reads)
            calls.append(self._remote(info.rank, method, columns, args[1:], *stored))
        return rows.join(self._wait(calls, method))

    def share(self, batch: RaggedBatch, per_step: int) -> SharedBatch:
        """Return the batch for calls; its columns are put in the object store when calls read them."""
        store = ObjectStore(self._processes.put, self._pass_on, self.addresses)
        return SharedBatch(batch, per_step, self.ranks, store)

    def begin(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """Start a call of every rank; return a function that waits for the results, in any thread.

        The function raises GangError like ``call``. Later calls wait in the ranks until this one has ended.
        """
        shared = [self._processes.put(arg) for arg in args]  # once, however many ranks get it
        calls = [self._remote(rank, method, *shared) for rank in range(len(self._order))]
        return partial(self._wait, calls, method)

    def beside(self, method: str, *args: Any) -> Callable[[], list[Any]]:
        """Start a method of every rank beside its calls; return a function that waits for the results.

        The wait, in any thread, has no limit: it ends with the gang. The function raises GangError when a
        rank fails or ends.
        """
        return self.beside_on(range(len(self._order)), method, *args)

    def beside_on(self, ranks: Sequence[int], method: str, *args: Any) -> Callable[[], list[Any]]:
        """Start a method beside the calls of some ranks; otherwise as ``beside``."""
        shared = [self._processes.put(arg) for arg in args]
        calls = [self._processes.beside(self._order[rank], method, *shared) for rank in ranks]

        def results() -> list[Any]:
            pending = list(calls)
            while pending:
                done, pending = self._processes.wait(pending, 1, _BESIDE_SECONDS)
                failure = next((error for error in map(self._processes.error, done) if error), None)
                if failure is not None:
                    raise self._failed(method, failure, dict(zip(calls, ranks, strict=True))) from failure
            return [self._processes.result(call) for call in calls]

        return results

    def notify(self, method: str, *args: Any) -> None:
        """Call a method of rank 0 in its watching thread, without waiting for it."""
        self._processes.ask(self._order[0], method, *args)

    def kill(self) -> None:
        """End every rank. Some may be gone already."""
        self._processes.kill()

    def _note_death(self, _died: "Future[None]") -> None:
        self._died_at = self._clock.now()

    def _note_leaving(self, process: "Future[int]") -> None:
        self._leaving.set_result(self.hosts[self._order.index(process.result())])

    def _pass_on(self, rank: int, stored: Any) -> Any:
        return self._processes.pass_on(self._order[rank], stored)

    def _remote(self, rank: int, method: str, *args: Any) -> Any:
        return self._processes.call(self._order[rank], method, *args)

    def _wait(self, calls: list[Any], method: str, limit: float = 0.0) -> list[Any]:
        pending = list(calls)
        watch = ProgressWatch(limit or self._hang, len(self._order), self._clock.now())
        while pending:
            done, pending = self._processes.wait(pending, 1, poll_seconds(self._hang))
            failure = next((error for error in map(self._processes.error, done) if error), None)
            if failure is not None:
                raise self._failed(method, failure, {call: r for r, call in enumerate(calls)}) from failure
            if done:
                watch.moved(self._clock.now())
                continue
            stands = watch.observe(self._ask_all("progress"), self._clock.now())
            if stands is not None:
                raise self._hanging(method, stands)
        return [self._processes.result(call) for call in calls]

    def _failed(self, method: str, failure: Exception, calls: dict[Any, int]) -> GangError:
        """Return the error that names what a rank raised. ``calls``: call -> rank."""
        since = self._clock.now() if self._died_at is None else self._died_at
        lost = self._lost()  # takes the seconds in which a death is noticed
        outside = bool(store_problem(failure))
        failed = lost or ([] if outside else self._raised(calls))
        return GangError(f"{method}: {one_line(failure)}", lost, outside, self._one_host(failed), since)

    def _raised(self, calls: dict[Any, int]) -> list[int]:
        """Return the ranks whose calls have failed; none if only some of the ranks were called."""
        if len(calls) < len(self._order):
            return []
        # An error of the job's own code comes from other ranks too, by now or a moment later.
        ended, _ = self._processes.wait(list(calls), len(calls), _OTHERS_SECONDS)
        return [calls[call] for call in ended if self._processes.error(call) is not None]

    def _hanging(self, method: str, stands: Standstill) -> GangError:
        """Return the error that names the stuck ranks; only now are stacks asked for."""
        since = self._clock.now() - stands.seconds
        positions: list[Position | None] = self._ask_all("position")
        for rank in stands.silent:
            positions[rank] = None
        if self._flight_records:
            self._ask_all("write_flight_record", self._flight_records)
        hosts = [str(host) for host in self.hosts]
        text = f"{method}: no progress in {stands.seconds:.0f} s: {report(positions, hosts)}"
        lost = self._lost()
        host = self._one_host(lost or stands.silent)
        return GangError(text, lost, caused_outside(positions), host, since)

    def _one_host(self, ranks: Sequence[int]) -> RankHost | None:
        """Return the host of the ranks if they are in one pod, and other ranks are elsewhere."""
        if not self.hosts:
            return None  # the processes have not started yet
        found = {self.hosts[rank].address: self.hosts[rank] for rank in ranks}
        elsewhere = len({host.address for host in self.hosts}) > 1
        return next(iter(found.values())) if len(found) == 1 and elsewhere else None

    def _ask_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method in every watching thread; return the results, None for ranks that do not answer."""
        calls = [self._processes.ask(index, method, *args) for index in self._order]
        ready, _ = self._processes.wait(calls, len(calls), _ANSWER_SECONDS)
        answered = {call for call in ready if self._processes.error(call) is None}
        return [self._processes.result(call) if call in answered else None for call in calls]

    def _lost(self) -> list[int]:
        """Return the ranks whose process has died."""
        dead = set(self._processes.dead())
        return [rank for rank, index in enumerate(self._order) if index in dead]
