"""Admission of jobs and pools, computed once per round so that all reconciles see the same result."""

import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from grpo_operator.api.base import Model
from grpo_operator.api.names import Owner, owner_in_labels, owner_of, rollout_pool
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec, RolloutTemplate
from grpo_operator.api.v1alpha1.status import LayoutStatus
from grpo_operator.observe.cache import Cache
from grpo_operator.plan import lifecycle
from grpo_operator.plan.accepted import ServedSpecs, is_accepted, spec_of
from grpo_operator.plan.capacity.admission import Claim, PoolCandidate, bind, waiting
from grpo_operator.plan.capacity.feasibility import PodRequest
from grpo_operator.plan.capacity.pod_requests import job_requests, pool_requests
from grpo_operator.plan.exports import own_pods
from grpo_operator.plan.fork import missing_checkpoint
from grpo_operator.plan.planner.resolve import RefusedError, resolve
from grpo_operator.plan.planner.resources import completed_pool
from grpo_operator.plan.planner.settled import with_layout, with_resources
from grpo_operator.plan.status.grpojob import layout_status, settled_layout

MANAGER = "rl.grpo.dev/grpo-operator"
SETTLE_SECONDS = 2.0  # after a reconcile, until the cache has what it wrote
_Spec = TypeVar("_Spec", bound=Model)


class AdmissionRound:
    """Owners that wait for capacity, and the job that each shared RolloutPool is bound to.

    An owner that is being started holds its capacity: its RayCluster may exist although the cache does not
    show it yet. An older owner that comes in that moment must not be admitted to the same nodes, nor another
    job be bound to the same pool.
    """

    def __init__(self, cache: Cache, now: Callable[[], float] = time.monotonic) -> None:
        self._cache, self._now = cache, now
        self._starting: dict[Owner, float] = {}  # with the time until which the owner holds its capacity
        self._waiting: dict[Owner, str] = {}
        self._writers: dict[Owner, Owner] = {}
        # Parsing hundreds of specs in each round would take most of its time.
        self._job_spec = _SpecCache(GRPOJobSpec, cache)
        self._pool_spec = _SpecCache(RolloutPoolSpec, cache)
        # Plans of jobs that wait, by UID, with what they were made of.
        self._layouts: dict[str, tuple[tuple[int, RolloutTemplate], LayoutStatus | None]] = {}

    def wait_reason(self, owner: Owner) -> str:
        """Return why the owner must wait for capacity, or "" when it need not."""
        return self._waiting.get(owner, "")

    def writer(self, pool: Owner) -> Owner | None:
        """Return the job that is bound to a RolloutPool, or None."""
        return self._writers.get(pool)

    def started(self, owner: Owner) -> None:
        """Note that a reconcile of the owner begins, which reads the admission now."""
        job = self._cache.owner(owner) if owner.kind == "GRPOJob" else None
        reference = job["spec"]["rollout"].get("poolRef") if job else None
        pool = reference["name"] if reference else ""
        lacks_checkpoint = job is not None and self._lacks_checkpoint(job, self._job_spec(job))
        if not lacks_checkpoint and not self._lacks_pool(owner, pool) and not self.wait_reason(owner):
            self._starting[owner] = float("inf")

    def ended(self, owner: Owner) -> None:
        """Note that the reconcile of the owner has ended."""
        if owner in self._starting:
            self._starting[owner] = self._now() + SETTLE_SECONDS

    def update(self) -> None:
        """Recompute the admission from the cache and the running reconciles."""
        now = self._now()
        self._starting = {owner: until for owner, until in self._starting.items() if until > now}
        self._job_spec.retain(self._cache.jobs.values())
        self._pool_spec.retain(self._cache.pools.values())
        waiting_jobs = {
            job["metadata"]["uid"] for job in self._cache.jobs.values() if not settled_layout(job)
        }
        self._layouts = {uid: plan for uid, plan in self._layouts.items() if uid in waiting_jobs}
        jobs = [pair for job in self._cache.jobs.values() if (pair := self._valid(job))]
        self._writers = bind(c for job, spec in jobs if (c := self._candidate(job, spec)))
        claims = [claim for job, spec in jobs if (claim := self._job_claim(job, spec))]
        claims += [claim for pool in self._cache.pools.values() if (claim := self._pool_claim(pool))]
        if all(claim.holds for claim in claims):
            self._waiting = {}
        else:
            leaving = self._cache.nodes_of_others({claim.key for claim in claims})
            self._waiting = waiting(claims, self._cache.usable_nodes, leaving)

    def _valid(self, job: dict[str, Any]) -> tuple[dict[str, Any], GRPOJobSpec] | None:
        """Return a job with its spec if it is managed by this operator, not ended and valid; else None."""
        if lifecycle.is_terminal(job.get("status") or {}) or job["metadata"].get("deletionTimestamp"):
            return None
        spec = self._job_spec(job)
        return (job, spec) if spec and spec.managed_by == MANAGER else None

    def _candidate(self, job: dict[str, Any], spec: GRPOJobSpec) -> PoolCandidate | None:
        """Return the job's candidacy for a shared RolloutPool; None if it uses none or is suspended."""
        if spec.rollout.pool_ref is None:
            return None
        owner = owner_of(job)
        holds = self._holds(owner) or bool(own_pods(self._cache.pods_of(owner)))
        if spec.suspend and not holds:
            return None
        return PoolCandidate(owner, spec.rollout.pool_ref.name, job["metadata"]["creationTimestamp"], holds)

    def _job_claim(self, job: dict[str, Any], spec: GRPOJobSpec) -> Claim | None:
        """Return the job's claim.

        None if it is suspended, queued in Kueue, or waits for a shared pool or another job's checkpoint.
        """
        if spec.suspend or spec.scheduling.queue_name or self._lacks_checkpoint(job, spec):
            return None
        owner, reference = owner_of(job), spec.rollout.pool_ref
        if self._lacks_pool(owner, reference.name if reference else ""):
            return None
        scaled = self._cache.pools.get((owner.namespace, rollout_pool(owner.name)))
        own = None if reference else self._pool_spec(scaled) if scaled else spec.rollout.template
        requests = self._requests(job, spec, own)
        return None if requests is None else self._claim(job, requests)

    def _lacks_checkpoint(self, job: dict[str, Any], spec: GRPOJobSpec | None) -> bool:
        """Return whether the job starts from a checkpoint of another job that has none, or never will."""
        try:
            return spec is not None and bool(missing_checkpoint(job, spec, self._cache.jobs))
        except RefusedError:
            return True

    def _lacks_pool(self, owner: Owner, pool: str) -> bool:
        """Return whether a job uses the shared RolloutPool ``pool``, "" for none, and is not bound to it."""
        return bool(pool) and self.writer(Owner("RolloutPool", owner.namespace, pool)) != owner

    def _requests(
        self, job: dict[str, Any], spec: GRPOJobSpec, own: RolloutTemplate | None
    ) -> list[PodRequest] | None:
        """Return what the job's pods request; None for a job that its plan refuses."""
        layout = settled_layout(job)
        if layout is None:
            reference = spec.rollout.pool_ref
            pool = own or self._shared(job, reference.name if reference else "")
            layout = self._layout(job, spec, pool) if pool else None
        if layout is None:
            return None
        return job_requests(with_layout(spec, layout), with_resources(own, layout) if own else None)

    def _shared(self, job: dict[str, Any], name: str) -> RolloutPoolSpec | None:
        pool = self._cache.pools.get((job["metadata"]["namespace"], name))
        return self._pool_spec(pool) if pool else None

    def _layout(self, job: dict[str, Any], spec: GRPOJobSpec, pool: RolloutTemplate) -> LayoutStatus | None:
        """Return the plan of a job that waits; None if it is refused. Each generation is planned once."""
        meta = job["metadata"]
        known = self._layouts.get(meta["uid"])
        if known is None or known[0] != (meta["generation"], pool):
            try:
                found: LayoutStatus | None = layout_status(resolve(spec, pool))
            except ValueError:  # RefusedError too: one job must not end the round of all
                found = None
            known = self._layouts[meta["uid"]] = ((meta["generation"], pool), found)
        return known[1]

    def _pool_claim(self, pool: dict[str, Any]) -> Claim | None:
        """Return the pool's claim; None for a pool of a job, which is part of the job's claim."""
        if owner_in_labels(pool) or pool["metadata"].get("deletionTimestamp"):
            return None
        spec = self._pool_spec(pool)
        if spec is None or spec.scheduling.queue_name:
            return None
        return self._claim(pool, pool_requests(completed_pool(spec)))

    def _claim(self, obj: dict[str, Any], requests: list[PodRequest]) -> Claim:
        owner = owner_of(obj)
        return Claim(owner, obj["metadata"]["creationTimestamp"], self._holds(owner), requests)

    def _holds(self, owner: Owner) -> bool:
        if owner in self._starting:
            return True
        cluster = self._cache.ray_clusters.get((owner.namespace, owner.name))
        return cluster is not None and not cluster["spec"].get("suspend")


class _SpecCache(Generic[_Spec]):
    """Parsed specs: each generation of an object is validated once. An invalid spec yields None.

    Other CRDs may make an invalid spec valid, so they empty the cache.
    """

    def __init__(self, model: type[_Spec], cache: Cache) -> None:
        self._model, self._cache = model, cache
        self._served: ServedSpecs = {}
        self._specs: dict[str, tuple[int, _Spec | None]] = {}  # by UID, with the generation

    def __call__(self, obj: dict[str, Any]) -> _Spec | None:
        meta, served = obj["metadata"], self._cache.served_specs
        if served is not self._served:  # read again, but seldom others
            if served != self._served:
                self._specs.clear()
            self._served = served
        generation, spec = self._specs.get(meta["uid"], (None, None))
        if generation != meta["generation"]:
            try:
                spec = spec_of(self._model, obj, is_accepted(obj), served)
            except ValidationError:
                spec = None
            self._specs[meta["uid"]] = (meta["generation"], spec)
        return spec

    def retain(self, objects: Iterable[dict[str, Any]]) -> None:
        """Drop the specs of all but these objects."""
        uids = {obj["metadata"]["uid"] for obj in objects}
        for gone in self._specs.keys() - uids:
            del self._specs[gone]
