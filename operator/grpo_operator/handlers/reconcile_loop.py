"""Reconcile loop: owners are reconciled right after a change, and periodically."""

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
from grpo_operator.handlers.gpu_health import GpuHealth
from grpo_operator.handlers.metrics import RECONCILE_SECONDS, RECONCILES
from grpo_operator.handlers.reconcilers.context import ReconcileContext
from grpo_operator.handlers.reconcilers.grpojob import JobReconciler
from grpo_operator.handlers.reconcilers.orphans import delete_orphans
from grpo_operator.handlers.reconcilers.rolloutpool import PoolReconciler
from grpo_operator.handlers.workqueue import WorkQueue
from grpo_operator.observe.cache import Cache
from grpo_operator.observe.prerequisites import Prerequisites
from grpo_operator.observe.relist import Relist

log = logging.getLogger(__name__)
ROUND_SECONDS = 1.0  # longest time between two rounds
BURST_SECONDS = 0.3  # pause after a round, so that one reconcile covers a burst of changes
PREREQUISITES_SECONDS = 10.0
RELIST_SECONDS = 600.0
CONCURRENCY = 4  # more reconciles at once would only wait for the API server


class Loop:
    """Background tasks of the operator: the reconcile rounds, the prerequisites check and the relist."""

    def __init__(self, cache: Cache, work: WorkQueue) -> None:
        self._cache = cache
        self._work = work
        self._wake = asyncio.Event()
        self._prerequisites_known = asyncio.Event()
        self._slots = asyncio.Semaphore(CONCURRENCY)

    def enqueue(self, owners: Iterable[Owner]) -> None:
        """Schedule owners for the next round."""
        for owner in owners:
            self._work.add(owner, time.monotonic())
        self._wake.set()

    async def run(self, context: ReconcileContext, relist: Relist, gpu_health: GpuHealth) -> None:
        """Reconcile until cancelled, starting once the cache is complete and the quarantine is known.

        With a partial cache the operator would apply children that already exist.
        """
        while not await _succeeds("listing", relist.wait_complete):  # noqa: ASYNC110 - retries, does not poll
            await asyncio.sleep(ROUND_SECONDS)
        while not await _succeeds("reading the strikes of nodes", gpu_health.load):  # noqa: ASYNC110
            await asyncio.sleep(ROUND_SECONDS)
        await self._prerequisites_known.wait()
        _release_memory()
        log.info("the cache is complete: %d jobs", len(self._cache.jobs))
        jobs, pools = JobReconciler(context), PoolReconciler(context)
        while True:
            context.poller.start()
            self._work.retain(self._cache.owners())
            due = self._work.pop_due(time.monotonic())
            if due:
                context.admissions.update()
                await asyncio.gather(*(self._one(jobs, pools, Owner(*key)) for key in due))
            await _succeeds("deleting orphans", lambda: delete_orphans(context.cache, context.writer))
            if due:  # the first change of a burst is handled at once, the rest together
                await asyncio.sleep(BURST_SECONDS)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), ROUND_SECONDS)
            self._wake.clear()

    async def check_prerequisites(self, prerequisites: Prerequisites) -> None:
        """Check KubeRay and the CRDs periodically; enqueue every owner when they changed."""

        async def check() -> None:
            if await prerequisites.refresh():
                self.enqueue(self._cache.owners())

        while True:
            if await _succeeds("checking KubeRay and the CRDs", check):
                self._prerequisites_known.set()
            await asyncio.sleep(PREREQUISITES_SECONDS)

    async def forget_deleted(self, relist: Relist) -> None:
        """Drop periodically the objects that were deleted while a watch was interrupted."""
        while True:
            await asyncio.sleep(RELIST_SECONDS)
            await _succeeds("listing", relist.forget_deleted)

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
            except Exception:  # one object must not stop the others; it is retried with back-off
                log.exception("reconciling %s %s/%s failed", *owner)
        RECONCILES.labels(owner.kind, "success" if succeeded else "error").inc()
        self._work.done(owner, succeeded, time.monotonic())


def _release_memory() -> None:
    """Return free heap memory to the kernel: the first listing grows the heap several times over."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)


async def _succeeds(what: str, call: Callable[[], Awaitable[None]]) -> bool:
    """Run the call; return False, for a later retry, when the API server fails or cannot be reached."""
    try:
        await call()
    except (ApiException, HTTPError) as error:
        log.warning("%s failed: %s", what, error)
        return False
    return True
