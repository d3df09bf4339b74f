"""Dispatcher of samples: a queue in prompt order, and the engines' room, refreshed from their own reports."""

import asyncio
import heapq
import itertools
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import httpx

from grpo_operator.api.v1alpha1.status import EngineState
from grpo_worker.rollout.engine_http import EngineHttp
from grpo_worker.rollout.engine_load import RankLoad, rank_loads
from grpo_worker.rollout.lease import Activity, Lease
from grpo_worker.rollout.placement import Place, Placement
from grpo_worker.rollout.routing import EngineEntry, EngineTable
from grpo_worker.rollout.trials import Trials

log = logging.getLogger(__name__)
POLL_SECONDS = 1.0  # between two looks at the engines while samples are awaited
_REPORT_SECONDS = 5.0  # for one report of an engine's load
_ROUNDING = 1e-9  # 0.55 x 20 is a little above 11


@dataclass(slots=True, eq=False)
class _Wanted:
    version: int
    prompt: int
    tokens: int
    avoid: set[str]
    trial: Callable[[], bool]
    share: float
    lease: "asyncio.Future[Lease]"


class Dispatcher:
    """Gives each sample a place on an engine as soon as there is room, and watches the engines.

    All methods run in the event loop and use its time alone. Samples get places in the order of their
    numbers, so that the batch's first prompts are complete first and a continued sample goes before new ones.
    """

    def __init__(
        self,
        table: EngineTable,
        http: EngineHttp,
        *,
        newer: bool,
        patience: float,
        hang_seconds: float,
        default: RankLoad,
        problem: Callable[[str], None],
    ) -> None:
        """``newer``: engines with later versions may continue a sample.

        ``patience``: seconds that samples wait while no engine serves their version. ``hang_seconds``:
        seconds without a token after which an engine is suspected; they may change. ``default``: load of
        engines that report none. ``problem``: receives what delays samples.
        """
        self._table, self._http = table, http
        self._newer, self._patience, self.hang_seconds = newer, patience, hang_seconds
        self._placement, self._trials = Placement(default), Trials()
        self._queues: dict[int, list[tuple[int, int, _Wanted]]] = {}
        self._ties = itertools.count()
        self._active: dict[str, Activity] = {}
        self._unserved: dict[int, float] = {}  # version -> since when no engine serves it
        self._problem = problem
        self._watcher: asyncio.Task[None] | None = None
        self._reports: dict[str, asyncio.Task[None]] = {}
        self._doubted: dict[str, tuple[EngineEntry, str]] = {}  # suspected because of an answer, and why

    @property
    def queued(self) -> int:
        """Number of samples that wait for a place."""
        return sum(len(queue) for queue in self._queues.values())

    @property
    def in_flight(self) -> int:
        """Number of requests on engines."""
        return sum(len(active.leases) for active in self._active.values())

    async def acquire(
        self, order: int, version: int, prompt: int, tokens: int, avoid: set[str],
        trial: Callable[[], bool] = lambda: False, share: float = 1.0,
    ) -> Lease:  # fmt: skip
        """Wait for a place. ``order``: smaller numbers first. ``tokens``, ``avoid``: see ``Placement.place``.

        ``share``: of the engines that may be used, see ``share_of``.

        ``trial``: returns whether the prompt is suspected to make engines fail. Until ``passed`` or
        ``release`` its engine tries no other such prompt, and no other engine tries this one.

        Raises TimeoutError when no engine serves ``version`` for the dispatcher's patience.
        """
        lease: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        wanted = _Wanted(version, prompt, tokens, avoid, trial, share, lease)
        heapq.heappush(self._queues.setdefault(version, []), (order, next(self._ties), wanted))
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        else:
            self._dispatch()
        try:
            return await lease
        except asyncio.CancelledError:
            if lease.done() and not lease.cancelled() and lease.exception() is None:
                self.release(lease.result())
            raise

    def release(self, lease: Lease) -> None:
        """End a request's use of its engine; the next sample takes its place."""
        active = self._active[lease.entry.name]
        active.leases.discard(lease)
        self._placement.release(lease.place)
        self._end_trial(lease)
        self._dispatch()

    def moved(self, lease: Lease) -> None:
        """Note tokens of a request. They end a suspicion that came from the answer to another request."""
        name = lease.entry.name
        lease.moved = _now()
        self._active[name].moves(lease.moved)
        if name in self._doubted:
            entry, reason = self._doubted.pop(name)
            if entry.life == lease.entry.life:
                self._table.trust(entry, reason)
                self._dispatch()

    def passed(self, lease: Lease) -> None:
        """End the trial of a request, which goes on."""
        self._end_trial(lease)
        self._dispatch()

    def suspect(self, lease: Lease, reason: str, answered: bool = False) -> None:
        """Stop using the engine of a request that failed until its agent reports a new state.

        Many requests fail when an engine dies; only the first of them counts, so that an engine which is back
        is not suspected because of the one before it. ``answered``: the engine is up and reported an error;
        it is used again as soon as another request gets tokens from it.
        """
        current = self._table.entry(lease.entry.name)
        if current is not None and current.life == lease.entry.life:
            if answered:
                if current.state is not EngineState.SERVING:
                    return
                self._doubted[current.name] = current, reason
            self._table.suspect(current.name, reason)

    def left(self, lease: Lease) -> bool:
        """Return whether the pod that a request ran on is gone: it was deleted or drained."""
        current = self._table.entry(lease.entry.name)
        before = lease.entry
        return current is None or (current.address, current.instance) != (before.address, before.instance)

    def changed(self, lease: Lease) -> bool:
        """Return whether the engine's agent has reported another state or version since a request began."""
        current = self._table.entry(lease.entry.name)
        if current is None or (current.life, current.since) != (lease.entry.life, lease.entry.since):
            return True
        return current.version is not None and current.version != lease.entry.version

    def forget(self, prompt: int) -> None:
        """Forget which engine holds a prompt of which no sample is left."""
        self._placement.forget(prompt)

    def serving(self, version: int, share: float = 1.0) -> set[str]:
        """Return the engines on which a sample of ``version`` may run. ``share``: as for ``acquire``."""
        return share_of({entry.name for entry in self._usable(version)}, share)

    def _usable(self, version: int) -> list[EngineEntry]:
        """Return the engines that serve ``version``, without those that were silent and still are."""
        entries = self._table.serving(version, self._newer)
        return [e for e in entries if e.name not in self._active or self._active[e.name].usable(e)]

    def _end_trial(self, lease: Lease) -> None:
        if lease.trial:
            lease.trial = False
            self._trials.end(lease.entry.name)

    def _dispatch(self) -> None:
        for version in sorted(self._queues):
            queue, put_back = self._queues[version], []
            entries = {e.name: e for e in self._usable(version)}
            if not entries or entries.keys() - self._active.keys():
                continue  # the first requests are spread when the load of all engines is known
            names_of: dict[float, set[str]] = {}  # engines by the share of them that a sample may use
            while queue:
                item = heapq.heappop(queue)
                wanted = item[-1]
                if wanted.lease.done():  # cancelled
                    continue
                if wanted.share not in names_of:
                    names_of[wanted.share] = share_of(entries, wanted.share)
                trial, names = wanted.trial(), names_of[wanted.share]
                allowed = self._trials.allowed(wanted.prompt, names) if trial else names
                place = self._placement.place(allowed, wanted.prompt, wanted.tokens, wanted.avoid)
                if place is None:
                    put_back.append(item)
                    if not wanted.avoid and not trial:
                        break
                    continue
                self._start(wanted, entries[place.engine], place, trial)
            for item in put_back:
                heapq.heappush(queue, item)
            if not queue:
                del self._queues[version]

    def _start(self, wanted: _Wanted, entry: EngineEntry, place: Place, trial: bool) -> None:
        active = self._active[entry.name]
        now = _now()
        if trial:
            self._trials.begin(entry.name, wanted.prompt)
        lease = Lease(entry, place, trial, now, now)
        if not active.leases:
            active.moved = now
        active.leases.add(lease)
        wanted.lease.set_result(lease)

    async def _watch(self) -> None:
        """Look at the engines until no sample is awaited."""
        while self.queued or self.in_flight:
            self._look()
            await asyncio.sleep(POLL_SECONDS)

    def _look(self) -> None:
        try:
            self._ask_for_reports()
            self._expire_silent()
            self._fail_unserved()
            self._dispatch()
        except Exception:  # samples would wait without end; the next look may succeed
            log.exception("looking at the engines failed")

    def _ask_for_reports(self) -> None:
        """Ask the engines that samples run on or wait for, except those that have not answered yet."""
        leases = [lease for active in self._active.values() for lease in active.leases]
        versions = set(self._queues) | {lease.entry.version or 0 for lease in leases}
        for entry in {e.name: e for v in versions for e in self._table.serving(v, self._newer)}.values():
            if entry.name not in self._reports:
                report = asyncio.create_task(self._report(entry))
                self._reports[entry.name] = report
                report.add_done_callback(partial(self._reported, entry.name))

    def _reported(self, engine: str, _: asyncio.Task[None]) -> None:
        del self._reports[engine]

    async def _report(self, entry: EngineEntry) -> None:
        """Read an engine's load; one that reports none keeps the load that it had, or the default."""
        loads: tuple[RankLoad, ...] | None = None
        try:
            async with asyncio.timeout(_REPORT_SECONDS):
                loads = rank_loads(await self._http.get(entry.address, "/v1/loads?include=core"))
        except (httpx.HTTPError, ValueError, TimeoutError) as error:
            log.debug("%s reports no load: %r", entry.name, error)
        active = self._active.setdefault(entry.name, Activity(moved=_now()))
        if loads is not None:
            if loads != active.loads:
                active.moves(_now())
            active.loads = loads
            self._placement.report(entry.name, loads)
        self._dispatch()

    def _expire_silent(self) -> None:
        """Send samples elsewhere that get no token; suspect an engine of which nothing moves.

        A request may also be silent because it waits in its engine or is generated slowly. It is lost only if
        its engine knows of fewer requests than were sent.
        """
        entries = {entry.name: entry for entry in self._table.entries()}
        now = _now()
        for name, active in self._active.items():
            silent = bool(active.leases) and now - active.moved >= self.hang_seconds
            stuck = now - self.hang_seconds
            lost = active.has_lost_some(stuck)
            late = [lease for lease in active.leases if silent or (lost and lease.moved <= stuck)]
            if silent:
                reason = f"no token for {self.hang_seconds:.0f} s from any of {len(late)} requests"
                self._problem(f"{name}: {reason}")
                if name in entries and entries[name].state is EngineState.SERVING:  # else it is updated
                    active.silent = entries[name]
                    self._table.suspect(name, reason)
            for lease in late:
                if lease.scope is not None:
                    lease.scope.reschedule(now)
                    lease.scope = None

    def _fail_unserved(self) -> None:
        now = _now()
        self._unserved = {v: since for v, since in self._unserved.items() if v in self._queues}
        for version in list(self._queues):
            if self._usable(version):
                self._unserved.pop(version, None)
                continue
            since = self._unserved.setdefault(version, now)
            text = f"no engine serves version {version} after {now - since:.0f} s"
            self._problem(text)
            if now - since >= self._patience:
                del self._unserved[version]
                for *_, wanted in self._queues.pop(version):
                    if not wanted.lease.done():
                        wanted.lease.set_exception(TimeoutError(text))


def share_of(engines: Iterable[str], share: float) -> set[str]:
    """Return a share of the engines, rounded up: the first ones by name."""
    names = sorted(engines)
    return set(names[: math.ceil(share * len(names) - _ROUNDING)])


def _now() -> float:
    return asyncio.get_running_loop().time()
