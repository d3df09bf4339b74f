"""Who may have pods, worked out once for each round so that all objects see the same."""

from collections.abc import Iterable
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from grpo_operator.api.base import Model
from grpo_operator.api.names import Owner, owner_in_labels, owner_of, rollout_pool
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec
from grpo_operator.observe.cache import Cache
from grpo_operator.plan import lifecycle
from grpo_operator.plan.capacity.admission import Claim, waiting
from grpo_operator.plan.capacity.feasibility import PodRequest
from grpo_operator.plan.capacity.pod_requests import job_needs, pool_needs
from grpo_operator.plan.capacity.pool_binding import PoolCandidate, bind

MANAGER = "rl.grpo.dev/grpo-operator"
_Spec = TypeVar("_Spec", bound=Model)


class AdmissionRound:
    """Room on the nodes, and the turns of jobs that share a RolloutPool."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._waiting: dict[Owner, str] = {}
        self._writers: dict[Owner, Owner] = {}
        # Specs by (uid, generation): parsing hundreds of them for each round would cost most of it.
        self._job_spec = _Parsed(GRPOJobSpec)
        self._pool_spec = _Parsed(RolloutPoolSpec)

    def waits(self, owner: Owner) -> str:
        """Why the owner must wait for room; "" when it need not."""
        return self._waiting.get(owner, "")

    def writer(self, pool: Owner) -> Owner | None:
        """The job that is bound to a RolloutPool."""
        return self._writers.get(pool)

    def update(self) -> None:
        """Work it out anew."""
        self._job_spec.keep(self._cache.jobs.values())
        self._pool_spec.keep(self._cache.pools.values())
        jobs = [found for job in self._cache.jobs.values() if (found := self._valid(job))]
        self._writers = bind(s for job, spec in jobs if (s := self._suitor(job, spec)))
        claims = [claim for job, spec in jobs if (claim := self._job_claim(job, spec))]
        claims += [claim for pool in self._cache.pools.values() if (claim := self._pool_claim(pool))]
        if all(claim.holds for claim in claims):
            self._waiting = {}
        else:
            leaving = self._cache.nodes_of_all_but({claim.key for claim in claims})
            self._waiting = waiting(claims, self._cache.nodes, leaving)

    def _valid(self, job: dict[str, Any]) -> tuple[dict[str, Any], GRPOJobSpec] | None:
        """A job that is ours, not ended and not invalid, with its spec."""
        if lifecycle.is_terminal(job.get("status") or {}) or job["metadata"].get("deletionTimestamp"):
            return None
        spec = self._job_spec(job)
        return (job, spec) if spec and spec.managed_by == MANAGER else None

    def _suitor(self, job: dict[str, Any], spec: GRPOJobSpec) -> PoolCandidate | None:
        if spec.rollout.pool_ref is None:
            return None
        owner = owner_of(job)
        holds = self._holds(owner) or bool(self._cache.pods_of(owner))
        if spec.suspend and not holds:
            return None
        return PoolCandidate(owner, spec.rollout.pool_ref.name, job["metadata"]["creationTimestamp"], holds)

    def _job_claim(self, job: dict[str, Any], spec: GRPOJobSpec) -> Claim | None:
        """None for a job that is suspended, queued elsewhere, or without its turn."""
        if spec.suspend or spec.scheduling.queue_name:
            return None
        owner, reference = owner_of(job), spec.rollout.pool_ref
        if reference and self.writer(Owner("RolloutPool", owner.namespace, reference.name)) != owner:
            return None
        scaled = self._cache.pools.get((owner.namespace, rollout_pool(owner.name)))
        own = self._pool_spec(scaled) if scaled else spec.rollout.template
        return self._claim(job, job_needs(spec, None if reference else own))

    def _pool_claim(self, pool: dict[str, Any]) -> Claim | None:
        """None for a pool of a job, which claims with it."""
        if owner_in_labels(pool) or pool["metadata"].get("deletionTimestamp"):
            return None
        spec = self._pool_spec(pool)
        return None if spec is None or spec.scheduling.queue_name else self._claim(pool, pool_needs(spec))

    def _claim(self, obj: dict[str, Any], needs: list[PodRequest]) -> Claim:
        owner = owner_of(obj)
        return Claim(owner, obj["metadata"]["creationTimestamp"], self._holds(owner), needs)

    def _holds(self, owner: Owner) -> bool:
        cluster = self._cache.ray_clusters.get((owner.namespace, owner.name))
        return cluster is not None and not cluster["spec"].get("suspend")


class _Parsed(Generic[_Spec]):
    """Validates the specs of objects, each generation once; None for what is invalid."""

    def __init__(self, model: type[_Spec]) -> None:
        self._model = model
        self._known: dict[str, tuple[int, _Spec | None]] = {}

    def __call__(self, obj: dict[str, Any]) -> _Spec | None:
        meta = obj["metadata"]
        generation, spec = self._known.get(meta["uid"], (None, None))
        if generation != meta["generation"]:
            try:
                spec = self._model.model_validate(obj["spec"])
            except ValidationError:
                spec = None
            self._known[meta["uid"]] = (meta["generation"], spec)
        return spec

    def keep(self, objects: Iterable[dict[str, Any]]) -> None:
        """Forget all but these."""
        uids = {obj["metadata"]["uid"] for obj in objects}
        for gone in self._known.keys() - uids:
            del self._known[gone]
