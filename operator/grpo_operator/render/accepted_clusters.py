"""RayClusters of accepted jobs and pools, whose pods no other operator changes (pure)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import ValidationError

from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec, RolloutTemplate
from grpo_operator.api.weight_path import WeightPath
from grpo_operator.kuberay_client.models import RayCluster
from grpo_operator.plan.capacity.topology import Leaves
from grpo_operator.plan.planner.resources import completed_pool
from grpo_operator.plan.weight_path import job_weight_path
from grpo_operator.render.config_map import owned_pool_spec
from grpo_operator.render.kept_parts import Parts, kept_record, parts_of, with_parts
from grpo_operator.render.metadata import covers
from grpo_operator.render.ray_cluster import job_cluster, pool_cluster
from grpo_operator.settings import OperatorSettings

_PATH, _POOL = "weightPath", "rolloutPool"
_SIZES = {"replicas", "minAvailable"}  # they change no pod
# In a pool that belongs to a job, the job's settings apply.
_OF_POOLS = {"model", "weightSync", "scheduling", "upgradeStrategy"}


@dataclass(frozen=True, slots=True)
class Places:
    """Places of pods. ``avoided``: hosts that pods with GPUs must not run on. ``failing``: hosts that
    training pods must not run on.
    """

    leaves: Leaves = Leaves()
    avoided: tuple[str, ...] = ()
    failing: tuple[str, ...] = ()

    def wire(self) -> Parts:
        """Return the leaves and hosts as JSON-compatible data."""
        return {"leaves": self.leaves.wire(), "avoided": list(self.avoided), "failing": list(self.failing)}

    @classmethod
    def read(cls, data: Parts) -> "Places":
        """Return the places of ``wire``, of any release."""
        return cls(Leaves.read(data["leaves"]), tuple(data["avoided"]), tuple(data.get("failing", ())))


@dataclass(frozen=True, slots=True)
class JobSources:
    """Sources of a job's pods. ``engines``: its ``own`` pool, or the shared one that it uses."""

    spec: GRPOJobSpec
    engines: RolloutTemplate
    own: bool
    places: Places

    def wire(self) -> Parts:
        """Return them as JSON-compatible data, without what changes no pod."""
        left_out = _SIZES | _OF_POOLS if self.own else _SIZES
        engines = {name: value for name, value in self.engines.wire().items() if name not in left_out}
        return {"spec": _running(self.spec), "engines": engines, "own": self.own} | self.places.wire()

    @classmethod
    def read(cls, data: Parts) -> "JobSources":
        """Return what any release has written. Raises ValidationError."""
        kind: type[RolloutTemplate] = RolloutTemplate if data["own"] else RolloutPoolSpec
        spec, engines = GRPOJobSpec.of_any_release(data["spec"]), kind.of_any_release(data["engines"])
        return cls(spec, engines, data["own"], Places.read(data))


class AcceptedJob(NamedTuple):
    """RayCluster of an accepted job. ``path``: of its weights.

    ``pool``: spec of its own RolloutPool, if it has one. It is not rendered again either: that would undo
    what users have scaled. ``spec``: of the job, for its pods.
    """

    cluster: RayCluster
    path: WeightPath
    pool: dict[str, Any] | None
    spec: Parts


def accepted_job(
    job: dict[str, Any], sources: JobSources, settings: OperatorSettings, suspend: bool, seen: str | None
) -> AcceptedJob:
    """Return what a job runs. ``seen``: record of the live RayCluster."""

    def render(of: JobSources) -> tuple[RayCluster, Parts]:
        pool, places = of.engines if of.own else None, of.places
        cluster = job_cluster(
            job, of.spec, pool, settings, suspend, places.leaves, places.avoided, places.failing
        )
        others = {_PATH: job_weight_path(of.spec, of.engines).wire(), _POOL: owned_pool_spec(of.spec)}
        return cluster, parts_of(cluster) | others

    cluster, parts = render(sources)
    record = kept_record(sources.wire(), parts, seen, lambda data: render(JobSources.read(data))[1])
    path = WeightPath.model_validate(record.parts[_PATH])
    spec = _as_recorded(_running(sources.spec), record.made_of["spec"])
    return AcceptedJob(with_parts(cluster, record), path, record.parts[_POOL], spec)


def _running(spec: GRPOJobSpec) -> Parts:
    return spec.model_copy(update={"suspend": False}).wire()


def _as_recorded(spec: Parts, recorded: Parts) -> Parts:
    """Return the recorded form of the spec unless it says something else.

    The release that recorded it may have completed it with more defaults or fewer. Of fields that this
    release does not know, only those of ``spec`` are compared: it lacks the others' defaults.
    """
    if spec == recorded:
        return spec
    try:
        now, then = (GRPOJobSpec.model_validate(data, extra="ignore") for data in (spec, recorded))
        same = now == then and covers(GRPOJobSpec.of_any_release(recorded).wire(), spec)
    except ValidationError:
        same = False
    return recorded if same else spec


def accepted_pool_cluster(
    pool: dict[str, Any], settings: OperatorSettings, places: Places, seen: str | None
) -> RayCluster:
    """Return the RayCluster of a RolloutPool without a job. ``seen``: record of the live RayCluster."""

    def render(spec: dict[str, Any], at: Places) -> RayCluster:
        # What this release plans where the spec sets nothing is no source, but a part of rendering it.
        completed = completed_pool(RolloutPoolSpec.of_any_release(spec))
        return pool_cluster(pool, completed, settings, at.leaves, at.avoided)

    cluster = render(pool["spec"], places)
    sources = {"spec": {name: value for name, value in pool["spec"].items() if name not in _SIZES}}
    record = kept_record(
        sources | places.wire(),
        parts_of(cluster),
        seen,
        lambda data: parts_of(render(data["spec"], Places.read(data))),
    )
    return with_parts(cluster, record)
