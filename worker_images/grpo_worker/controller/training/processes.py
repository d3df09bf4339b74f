"""Processes of the ranks: the remote calls that a worker group is built on."""

import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

log = logging.getLogger(__name__)
# Concurrency groups: threads of an actor that work while a call runs.
_WATCH, _LIVE, _BESIDE = "watch", "live", "beside"
_LIVE_SECONDS = 60.0  # of one call whose only purpose is to fail when its process dies
_WATCH_SECONDS = 1.0  # between two looks at whether the watch has ended
_DEATH_SECONDS = 5.0  # Ray needs a moment to notice a death that has already broken a call of another rank
_GRACE_SECONDS = 0.5  # ranks of one pod die one after the other


class RankProcesses(Protocol):
    """One process for each rank. Calls are hashable handles, which only these methods read."""

    @property
    def count(self) -> int:
        """Number of processes."""

    @property
    def died(self) -> "Future[None]":
        """Completed when the first process has ended."""

    @property
    def leaving(self) -> "Future[int]":
        """Completed with the first process whose pod is about to end."""

    def put(self, value: Any) -> Any:
        """Store an argument once for all processes; return what stands for it in a call."""

    def pass_on(self, index: int, stored: Any) -> Any:
        """Copy a stored argument to the pod of a process; return what stands for the copy in a call.

        Does not wait for the copy. Processes in other pods fetch it from that pod.
        """

    def call(self, index: int, method: str, *args: Any) -> Any:
        """Start a method in the thread that computes; calls of one process run one after the other."""

    def ask(self, index: int, method: str, *args: Any) -> Any:
        """Start a method in the thread that watches, which answers while a call runs."""

    def beside(self, index: int, method: str, *args: Any) -> Any:
        """Start a method in the thread that works beside the calls, such as one that waits for a store."""

    def wait(self, calls: Sequence[Any], count: int, seconds: float) -> tuple[list[Any], list[Any]]:
        """Wait until ``count`` calls have ended, at most ``seconds``; return those ended, and the others."""

    def error(self, call: Any) -> Exception | None:
        """Return the error of a call that has ended."""

    def result(self, call: Any) -> Any:
        """Return the result of a call that has ended without an error."""

    def dead(self) -> list[int]:
        """Return the processes that have ended, ascending, after the moment that noticing takes."""

    def kill(self) -> None:
        """End every process. Some may be gone already."""


class RayProcesses:
    """Ray actors of a class, one on each bundle of a placement group."""

    def __init__(
        self, cls: type, pool: PlacementGroup, gpus: int = 0, runtime_env: dict[str, Any] | None = None
    ) -> None:
        """``gpus``: GPUs of each process; it sees no others."""
        groups = {_WATCH: 1, _LIVE: 1, _BESIDE: 1}
        remote = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups=groups)(cls)
        self._actors = [
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
        self.count = len(self._actors)
        self.died: Future[None] = Future()
        self.leaving: Future[int] = Future()
        self._dead: set[int] = set()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch_deaths, daemon=True, name="rank-deaths")
        self._watcher.start()

    def put(self, value: Any) -> Any:
        return ray.put(value)

    def pass_on(self, index: int, stored: Any) -> Any:
        # Ray keeps a result where it was made. The thread that watches makes it while a call runs.
        return self._in_group(_WATCH, index, "pass_on", stored)

    def call(self, index: int, method: str, *args: Any) -> Any:
        return getattr(self._actors[index], method).remote(*args)

    def ask(self, index: int, method: str, *args: Any) -> Any:
        return self._in_group(_WATCH, index, method, *args)

    def beside(self, index: int, method: str, *args: Any) -> Any:
        return self._in_group(_BESIDE, index, method, *args)

    def _in_group(self, group: str, index: int, method: str, *args: Any) -> Any:
        return getattr(self._actors[index], method).options(concurrency_group=group).remote(*args)

    def wait(self, calls: Sequence[Any], count: int, seconds: float) -> tuple[list[Any], list[Any]]:
        done, pending = ray.wait(list(calls), num_returns=count, timeout=seconds)
        return list(done), list(pending)

    def error(self, call: Any) -> Exception | None:
        try:
            ray.get(call)
        except ray.exceptions.RayError as error:
            failure: Exception = error
            return failure
        return None

    def result(self, call: Any) -> Any:
        return ray.get(call)

    def dead(self) -> list[int]:
        if wait([self.died], timeout=_DEATH_SECONDS).done:
            time.sleep(_GRACE_SECONDS)
        return sorted(self._dead)

    def kill(self) -> None:
        self._ended.set()
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        # A call of Ray after ray.shutdown() would start a second Ray.
        self._watcher.join(_WATCH_SECONDS + _DEATH_SECONDS)

    def _watch_deaths(self) -> None:
        """Notice within seconds that a process ends, also while no call of the gang runs."""
        calls = {self._live(index): index for index in range(self.count)}
        while calls and not self._ended.is_set():
            done, _ = self.wait(list(calls), 1, _WATCH_SECONDS)
            for call in done:
                index = calls.pop(call)
                error = self.error(call)
                if isinstance(error, ray.exceptions.RayActorError):
                    self._dead.add(index)
                    continue
                leaves = error is None and self.result(call)
                if leaves and not self.leaving.done():
                    self.leaving.set_result(index)
                calls[self._live(index, not leaves)] = index
            if self._dead and not self.died.done() and not self._ended.is_set():
                log.warning("processes of the gang have ended: %s", sorted(self._dead))
                self.died.set_result(None)

    def _live(self, index: int, heed: bool = True) -> Any:
        return self._in_group(_LIVE, index, "live", _LIVE_SECONDS, heed)
