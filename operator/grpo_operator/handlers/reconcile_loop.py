"""The reconcile loop: what is due is reconciled, at once after a change and now and then."""

import asyncio
import contextlib
import ctypes
import gc
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from grpo_operator.api.names import Owner
from grpo_operator.handlers.metrics import RECONCILE_SECONDS, RECONCILES
from grpo_operator.handlers.reconcilers.context import ReconcileContext
from grpo_operator.handlers.reconcilers.grpojob import JobReconciler
from grpo_operator.handlers.reconcilers.orphans import delete_orphans
from grpo_operator.handlers.reconcilers.rolloutpool import PoolReconciler
from grpo_operator.handlers.workqueue import WorkQueue
from grpo_operator.observe.cache import Cache
from grpo_operator.observe.prerequisites import Prerequisites
from grpo_operator.observe.relist import Listing

log = logging.getLogger(__name__)
LOOK_SECONDS = 1.0
BURST_SECONDS = 0.3
SURROUNDINGS_SECONDS = 10.0
LISTING_SECONDS = 600.0
CONCURRENCY = 4  # more would only wait for the API server together


class Loop:
    """Everything that runs beside the watches."""

    def __init__(self, cache: Cache, work: WorkQueue) -> None:
        self._cache = cache
        self._work = work
        self._wake = asyncio.Event()
        self._looked = asyncio.Event()
        self._slots = asyncio.Semaphore(CONCURRENCY)

    def mark(self, owners: Iterable[Owner]) -> None:
        """Something changed for these."""
        for owner in owners:
            self._work.mark(owner, time.monotonic())
        self._wake.set()

    async def run(self, context: ReconcileContext, listing: Listing) -> None:
        """Reconcile for ever, beginning when the cache is whole."""
        while not await _tried("listing", listing.wait_whole):  # noqa: ASYNC110 - it is no waiting
            await asyncio.sleep(LOOK_SECONDS)
        await self._looked.wait()
        _give_back_memory()
        log.info("the cache is whole: %d jobs", len(self._cache.jobs))
        jobs, pools = JobReconciler(context), PoolReconciler(context)
        while True:
            context.poller.start()
            self._work.forget_all_but(self._cache.owners())
            due = self._work.take(time.monotonic())
            if due:
                context.admissions.update()
                await asyncio.gather(*(self._one(jobs, pools, Owner(*key)) for key in due))
            await _tried("orphans", lambda: delete_orphans(context.cache, context.writer))
            if due:  # the first change of a burst was heeded at once; now its rest
                await asyncio.sleep(BURST_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), LOOK_SECONDS)
            self._wake.clear()

    async def look_around(self, surroundings: Prerequisites) -> None:
        """Jobs wait, and say why, while KubeRay is missing or too old, or the CRDs are."""

        async def look() -> None:
            if await surroundings.look():
                self.mark(self._cache.owners())

        while True:
            if await _tried("looking at KubeRay and the CRDs", look):
                self._looked.set()
            await asyncio.sleep(SURROUNDINGS_SECONDS)

    async def forget_deleted(self, listing: Listing) -> None:
        """Find, now and then, what vanished while a watch was down."""
        while True:
            await asyncio.sleep(LISTING_SECONDS)
            await _tried("listing", listing.forget_deleted)

    async def _one(self, jobs: JobReconciler, pools: PoolReconciler, owner: Owner) -> None:
        succeeded = False
        async with self._slots:
            obj = self._cache.owner(owner)
            if obj is None:
                return
            try:
                with RECONCILE_SECONDS.labels(owner.kind).time():
                    await (jobs.reconcile(obj) if owner.kind == "GRPOJob" else pools.reconcile(obj))
                succeeded = True
            except Exception:
                log.exception("%s %s/%s", *owner)
        RECONCILES.labels(owner.kind, "success" if succeeded else "error").inc()
        self._work.done(owner, succeeded, time.monotonic())


def _give_back_memory() -> None:
    """Listing tens of thousands of pods leaves the heap several times as large as it needs to be."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # glibc alone has it
        ctypes.CDLL(None).malloc_trim(0)


async def _tried(what: str, call: Callable[[], Awaitable[None]]) -> bool:
    """Did the call succeed? The API server may be away; the caller comes again."""
    try:
        await call()
    except (ApiException, HTTPError) as error:
        log.warning("%s: %s", what, error)
        return False
    return True
