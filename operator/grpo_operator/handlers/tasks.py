"""Background tasks of the operator beside kopf's watches."""

import asyncio
import contextlib
import ctypes
import gc
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from grpo_operator.handlers.background import succeeds, until_success
from grpo_operator.handlers.gpu_health import GpuHealth
from grpo_operator.handlers.leader import Leader
from grpo_operator.handlers.reconcile_loop import Loop
from grpo_operator.handlers.reconcilers.admission_round import AdmissionRound
from grpo_operator.handlers.reconcilers.context import ReconcileContext
from grpo_operator.handlers.reconcilers.grpojob import JobReconciler
from grpo_operator.handlers.reconcilers.orphans import delete_orphans
from grpo_operator.handlers.reconcilers.rolloutpool import PoolReconciler
from grpo_operator.observe.freshness import Freshness
from grpo_operator.observe.prerequisites import Prerequisites
from grpo_operator.observe.relist import Relist

log = logging.getLogger(__name__)
PREREQUISITES_SECONDS = 10.0
RELIST_SECONDS = 600.0
ORPHANS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Tasks:
    """The tasks, none of which ends by itself."""

    loop: Loop
    context: ReconcileContext
    admissions: AdmissionRound
    relist: Relist
    prerequisites: Prerequisites
    gpu_health: GpuHealth
    freshness: Freshness
    leader: Leader
    _prerequisites_known: asyncio.Event = field(default_factory=asyncio.Event)
    _cache_complete: asyncio.Event = field(default_factory=asyncio.Event)

    def all(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return the tasks by name."""
        return {
            "electing a leader": self.leader.run,
            "filling the cache": self.fill_cache,
            "checking prerequisites": self.check_prerequisites,
            "checking watches": self.freshness.run,
            "dropping deleted objects": self.forget_deleted,
            "reconciling": lambda: self._lead(self.reconcile),
            "deleting orphans": lambda: self._lead(self.delete_orphans),
            "GPU health": lambda: self._lead(self.gpu_health.run),
        }

    @property
    def on_standby(self) -> bool:
        """Return whether only another leader keeps this replica from its work."""
        return self._cache_complete.is_set() and not self.leader.leads

    async def fill_cache(self) -> None:
        """Wait until the watches have delivered everything.

        With a partial cache the operator would apply children that already exist.
        """
        await until_success("listing", self.relist.wait_complete)
        await self._prerequisites_known.wait()
        _release_memory()
        log.info("the cache is complete: %d jobs", len(self.context.cache.jobs))
        self._cache_complete.set()
        await asyncio.Event().wait()

    async def _lead(self, work: Callable[[], Awaitable[None]]) -> None:
        await self._cache_complete.wait()
        await self.leader.while_leading(work)

    async def reconcile(self) -> None:
        """Reconcile until cancelled, once the quarantine is known."""
        await until_success("reading the strikes of nodes", self.gpu_health.load)
        jobs, pools = JobReconciler(self.context), PoolReconciler(self.context)
        reconcilers = {"GRPOJob": jobs.reconcile, "RolloutPool": pools.reconcile}
        await self.loop.run(self.admissions, reconcilers, self.context.poller.start)

    async def check_prerequisites(self) -> None:
        """Check KubeRay and the CRDs periodically; enqueue every owner when they changed."""

        async def check() -> None:
            if await self.prerequisites.refresh():
                self.loop.enqueue(self.context.cache.owners())

        while True:
            if await succeeds("checking KubeRay and the CRDs", check):
                self._prerequisites_known.set()
            await asyncio.sleep(PREREQUISITES_SECONDS)

    async def forget_deleted(self) -> None:
        """Drop periodically the objects that were deleted while a watch was interrupted."""
        while True:
            await asyncio.sleep(RELIST_SECONDS)
            await succeeds("listing", self.relist.forget_deleted)

    async def delete_orphans(self) -> None:
        """Delete RayClusters whose owners are gone: beside the loop, because the API server is asked."""
        while True:
            await until_success(
                "deleting orphans", lambda: delete_orphans(self.context.cache, self.context.writer)
            )
            await asyncio.sleep(ORPHANS_SECONDS)


def _release_memory() -> None:
    """Return free heap memory to the kernel: the first listing grows the heap several times over."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
