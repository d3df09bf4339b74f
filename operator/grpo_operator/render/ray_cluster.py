"""RayCluster of a job, or of a RolloutPool without a job (pure)."""

import json
from collections.abc import Iterable
from typing import Any

from grpo_operator.api import names
from grpo_operator.api.base import Device
from grpo_operator.api.names import owner_of
from grpo_operator.api.v1alpha1.grpojob import ControllerSpec, GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec, RolloutTemplate
from grpo_operator.api.weight_path import Backend, WeightPath
from grpo_operator.kuberay_client.models import HeadGroup, RayCluster, RayClusterSpec, WorkerGroup
from grpo_operator.plan.capacity.pod_requests import head_resources
from grpo_operator.plan.capacity.topology import Leaves
from grpo_operator.plan.serving import serving_of
from grpo_operator.plan.weight_path import job_weight_path, pool_weight_path
from grpo_operator.render.job_pods import JobPods, trainer_ray_resources
from grpo_operator.render.metadata import metadata
from grpo_operator.render.placement import cluster_labels
from grpo_operator.render.pod_template import PodParts
from grpo_operator.render.rollout_pods import EnginePods
from grpo_operator.render.services import NO_LEAVES, rollout_groups
from grpo_operator.render.tls import pod_tls
from grpo_operator.render.volumes import model_files
from grpo_operator.settings import OperatorSettings

RAY_VERSION = "2.60.0"
_SMALL_STORE = {"object-store-memory": "200000000"}  # bytes; Ray's default is 30 % of memory


def settled_leaves(cluster: dict[str, Any] | None) -> Leaves | None:
    """Return the leaves that an existing RayCluster was rendered with, or None."""
    annotations = (cluster or {}).get("metadata", {}).get("annotations") or {}
    text = annotations.get(names.LEAVES_ANNOTATION)
    if text is None:
        return None
    return Leaves.read(json.loads(text))


def job_cluster(
    job: dict[str, Any],
    spec: GRPOJobSpec,
    pool: RolloutTemplate | None,
    settings: OperatorSettings,
    suspend: bool,
    leaves: Leaves = NO_LEAVES,
    avoided: tuple[str, ...] = (),
    failing: tuple[str, ...] = (),
) -> RayCluster:
    """Return a job's RayCluster: head, controller, training pool, and the engines of its own ``pool``.

    ``avoided``: hosts that its pods with GPUs must not run on. ``failing``: hosts that its training pods must
    not run on.
    """
    trainer = spec.trainer
    on_gpu = trainer.device == Device.CUDA
    # With a shared pool, the job's pods do not depend on the path.
    path = job_weight_path(spec, pool) if pool else WeightPath()
    parts = job_parts(job, spec, path, settings, avoided)
    pods = JobPods(parts, spec, leaves, names.writer(job), path, failing)
    resources = {"resources": trainer_ray_resources(trainer.gpus_per_node)}
    params = {} if on_gpu else _SMALL_STORE
    groups = [
        _group(names.CONTROLLER, 1, pods.controller(), params),
        _group(names.TRAINER, trainer.pods, pods.trainer(), params | resources),
        *_engine_groups(pods.engines(), pool, leaves),
    ]
    return _cluster(job, spec, pods.head(), params, groups, suspend, leaves)


def job_parts(
    job: dict[str, Any], spec: GRPOJobSpec, path: WeightPath, settings: OperatorSettings,
    avoided: tuple[str, ...] = (),
) -> PodParts:  # fmt: skip
    """Return the common parts of a job's pods. ``path``: of weights into its own engines."""
    shared = spec.rollout.pool_ref
    return PodParts(
        owner_of(job), spec.scheduling, settings, spec.trainer.device == Device.CUDA, names.key_secret(job),
        avoided, path.direct is Backend.CUDA_IPC,
        paired=shared is not None,
        tls=pod_tls(job, spec.scheduling.tls, shared.name if shared else None),
    )  # fmt: skip


def pool_cluster(
    pool: dict[str, Any],
    spec: RolloutPoolSpec,
    settings: OperatorSettings,
    leaves: Leaves = NO_LEAVES,
    avoided: tuple[str, ...] = (),
) -> RayCluster:
    """Return the RayCluster of a RolloutPool without a job: engines, and the head that KubeRay requires."""
    on_gpu = spec.engine.device == Device.CUDA
    key = names.key_secret(pool)
    tls = pod_tls(pool, spec.scheduling.tls)
    parts = PodParts(owner_of(pool), spec.scheduling, settings, on_gpu, key, avoided, tls=tls)
    path = pool_weight_path(spec)
    engines = EnginePods(
        parts, spec.model.path, spec.weight_sync, path,
        model=model_files(spec.model),
        serving=serving_of(pool, spec),
    )  # fmt: skip
    head = parts.head(settings.trainer_image, ControllerSpec(), head_resources(0))
    params = {} if on_gpu else _SMALL_STORE
    return _cluster(pool, spec, head, params, _engine_groups(engines, spec, leaves), False, leaves)


def _cluster(
    owner: dict[str, Any], spec: GRPOJobSpec | RolloutPoolSpec, head: dict[str, Any],
    params: dict[str, str], groups: Iterable[WorkerGroup], suspend: bool, leaves: Leaves,
) -> RayCluster:  # fmt: skip
    annotations = {
        names.LEAVES_ANNOTATION: json.dumps(leaves.wire()),
        names.OWNER_UID: owner["metadata"]["uid"],
    }
    described = metadata(owner, owner["metadata"]["name"], cluster_labels(spec.scheduling), annotations)
    if spec.scheduling.gang_scheduler == "kai":
        del described["ownerReferences"]
    return RayCluster(
        metadata=described,
        spec=RayClusterSpec(
            ray_version=RAY_VERSION,
            suspend=None if spec.scheduling.queue_name else suspend,
            auth_options={"mode": "token"},
            upgrade_strategy=None if spec.upgrade_strategy == "None" else {"type": spec.upgrade_strategy},
            gcs_fault_tolerance_options=_gcs_options(spec),
            head_group_spec=HeadGroup(
                ray_start_params={"num-cpus": "0", "dashboard-host": "0.0.0.0"} | params, template=head
            ),
            worker_group_specs=list(groups),
        ),
    )


def _gcs_options(spec: GRPOJobSpec | RolloutPoolSpec) -> dict[str, Any] | None:
    """Return KubeRay's options for a head whose state outlives it. Only the ranks of a job need it."""
    given = spec.head.gcs_fault_tolerance if isinstance(spec, GRPOJobSpec) else None
    if given is None:
        return None
    credentials = {"redisUsername": given.redis_username, "redisPassword": given.redis_password}
    return {"redisAddress": given.redis_address} | {
        name: {"valueFrom": {"secretKeyRef": {"name": found.secret, "key": found.key}}}
        for name, found in credentials.items()
        if found is not None
    }


def _engine_groups(pods: EnginePods, pool: RolloutTemplate | None, leaves: Leaves) -> Iterable[WorkerGroup]:
    if pool is None:
        return
    for group, leaf, engines in rollout_groups(pool, leaves):
        yield _group(group, engines, pods.pod(pool, leaf), {}, pool.engine.nodes_per_engine)


def _group(
    name: str, replicas: int, template: dict[str, Any], params: dict[str, str], hosts: int = 1
) -> WorkerGroup:
    return WorkerGroup(
        group_name=name,
        num_of_hosts=hosts,
        replicas=replicas,
        min_replicas=replicas,
        max_replicas=replicas,
        ray_start_params={"num-cpus": "0"} | params,
        template=template,
    )
