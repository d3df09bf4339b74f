"""Group of Ray actors, one per rank, that is called like one worker."""

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from grpo_worker.common.errors import one_line
from grpo_worker.profiling.hang import Position, report, stuck_ranks
from grpo_worker.roles.dispatch import BatchPartition, Dispatch, RankInfo, dispatch_mode

log = logging.getLogger(__name__)
_WATCH = "watch"  # concurrency group of an actor: its thread answers while another call runs
# Takes as long as the store needs. Ranks that wait for each other without progress still end it.
_UNBOUNDED = frozenset({"export_weights"})
_WATCH_TIMEOUT = 10.0  # seconds for an answer of the threads that watch


class GangError(RuntimeError):
    """A rank failed, died or hung, so the gang must be restarted. ``lost``: ranks that died."""

    def __init__(self, message: str, lost: list[int]) -> None:
        super().__init__(message)
        self.lost = lost


class WorkerGroup:
    """Ranks on the bundles of one placement group.

    Every call takes at most ``timeout`` seconds. It fails if any rank fails, because the others may be stuck
    in a collective and cannot be used again. A call also fails if some ranks wait for others without any
    progress for ``hang`` seconds; the error then names the ranks that are stuck.
    """

    def __init__(
        self,
        cls: type,
        pool: PlacementGroup,
        timeout: float,
        hang: float = 240.0,
        gpus: int = 0,
        runtime_env: dict[str, Any] | None = None,
        flight_records: str = "",
    ) -> None:
        """Create the actors.

        ``gpus``: GPUs of each rank; it sees no others. ``flight_records``: folder for the ranks' flight
        records after a hang.
        """
        self._cls = cls
        self._timeout = timeout
        self._hang = hang
        self._flight_records = flight_records
        remote = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={_WATCH: 1})(cls)
        unordered = [
            remote.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=pool, placement_group_bundle_index=index
                ),
                resources={"trainer": 1},
                num_gpus=gpus,
                runtime_env=runtime_env,
            ).remote()
            for index in range(pool.bundle_count)
        ]
        self._actors = unordered
        nodes = self._wait([actor.node.remote() for actor in unordered], "start")
        # Ranks of one node must be consecutive, so that tensor parallelism stays within a node.
        order = sorted(range(len(unordered)), key=lambda i: (nodes[i][0], i))
        self._actors = [unordered[i] for i in order]
        self.addresses = [nodes[i][0] for i in order]
        self.pids = [nodes[i][1] for i in order]
        self.ranks: list[RankInfo] = []

    def start(self, config: dict[str, Any]) -> None:
        """Rendezvous at rank 0 and build the model on every rank."""
        port = self._wait([self._actors[0].free_port.remote()], "free_port")[0]
        world = len(self._actors)
        calls = [
            actor.start.remote(rank, world, self.addresses[0], port, config)
            for rank, actor in enumerate(self._actors)
        ]
        self.ranks = self._wait(calls, "start")

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a registered method by its dispatch protocol.

        Raises GangError when any rank fails, and AttributeError for unregistered methods.
        """
        mode = dispatch_mode(getattr(self._cls, method))
        if mode is None:
            raise AttributeError(f"{self._cls.__name__}.{method} is not registered for dispatch")
        if mode is Dispatch.RANK_ZERO:
            return self._wait([self._remote(0, method, *args, **kwargs)], method)[0]
        if mode is Dispatch.ONE_TO_ALL:
            return self.begin(method, *args, **kwargs)()
        partition = BatchPartition(args[0], self.ranks, mode)
        stored = [ray.put(part) for part in partition.parts]  # once, however many ranks get it
        calls = [
            self._remote(r, method, stored[n], *args[1:], **kwargs) for r, n in enumerate(partition.part_of)
        ]
        return partition.join(self._wait(calls, method))

    def begin(self, method: str, *args: Any, **kwargs: Any) -> Callable[[], list[Any]]:
        """Start a call of every rank; return a function that waits for the results, in any thread.

        The function raises GangError like ``call``. Later calls wait in the ranks until this one has ended.
        """
        shared = [ray.put(arg) for arg in args]  # once, however many ranks get it
        calls = [self._remote(r, method, *shared, **kwargs) for r in range(len(self._actors))]
        return partial(self._wait, calls, method)

    def notify(self, method: str, *args: Any) -> None:
        """Call a method of rank 0 in its watching thread, without waiting for it."""
        getattr(self._actors[0], method).options(concurrency_group=_WATCH).remote(*args)

    def kill(self) -> None:
        """End every rank. Some may be gone already."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)

    def _remote(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._actors[rank], method).remote(*args, **kwargs)

    def _wait(self, calls: list[Any], method: str) -> list[Any]:
        pending = list(calls)
        failure: Exception | None = None
        watchdog = _Watchdog(math.inf if method in _UNBOUNDED else self._timeout, self._hang)
        while pending and failure is None:
            done, pending = ray.wait(pending, num_returns=1, timeout=self._hang / 4)
            failure = next((error for error in map(_error, done) if error), None)
            if not done:
                failure = watchdog.check(self._positions())
                if failure is not None and self._flight_records:
                    self._ask_all("write_flight_record", self._flight_records)
        if failure is None:
            return list(ray.get(calls))
        raise GangError(f"{method}: {one_line(failure)}", self._lost()) from failure

    def _positions(self) -> list[Position | None]:
        """Return the position of each rank in its collectives; None for ranks that do not answer."""
        return self._ask_all("position")

    def _ask_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method in every watching thread; return the results, None for ranks that do not answer."""
        calls = [
            getattr(actor, method).options(concurrency_group=_WATCH).remote(*args) for actor in self._actors
        ]
        ready, _ = ray.wait(calls, num_returns=len(calls), timeout=_WATCH_TIMEOUT)
        return [ray.get(call) if call in ready and not _error(call) else None for call in calls]

    def _lost(self) -> list[int]:
        """Return the ranks whose process has died. Ray needs a moment to notice, so wait a little."""
        lost = []
        for rank, actor in enumerate(self._actors):
            try:
                ray.get(actor.node.options(concurrency_group=_WATCH).remote(), timeout=5)
            except ray.exceptions.RayActorError:
                lost.append(rank)
            except ray.exceptions.RayError:
                continue  # the process hangs, but exists
        return lost


class _Watchdog:
    """Detects a call that takes too long or does not progress."""

    def __init__(self, timeout: float, hang: float) -> None:
        self._timeout, self._hang = timeout, hang
        self._began = self._moved = time.monotonic()
        self._last: list[dict[str, int] | None] = []

    def check(self, positions: list[Position | None]) -> Exception | None:
        """Return the problem of the call, or None."""
        now = time.monotonic()
        begun = [None if position is None else position.begun for position in positions]
        if begun != self._last:
            self._last, self._moved = begun, now
        # If no rank waits for another one, the call may be a long computation.
        if stuck_ranks(positions) and now - self._moved >= self._hang:
            return TimeoutError(f"no progress in {now - self._moved:.0f} s: {report(positions)}")
        if now - self._began > self._timeout:
            return TimeoutError(f"no answer in {self._timeout:.0f} s: {report(positions)}")
        return None


def _error(call: Any) -> Exception | None:
    try:
        ray.get(call)
    except ray.exceptions.RayError as error:
        failure: Exception = error
        return failure
    return None
