"""All children of a job as manifests (pure)."""

import hashlib
import json
from dataclasses import asdict
from typing import Any

from grpo_operator.api.base import API_VERSION, Device
from grpo_operator.api.grpojob import GRPOJobSpec
from grpo_operator.api.rolloutpool import RolloutPoolSpec
from grpo_operator.kuberay_client.models import HeadGroup, RayCluster, RayClusterSpec, WorkerGroup
from grpo_operator.plan import names
from grpo_operator.plan.names import AGENT_PORT, ENGINE_PORT
from grpo_operator.plan.topology import Leaves
from grpo_operator.render.metadata import metadata
from grpo_operator.render.placement import cluster_labels
from grpo_operator.render.pods import STORE_MOUNT, PodBuilder, trainer_ray_resources
from grpo_operator.render.settings import OperatorSettings

RAY_VERSION = "2.60.0"
NO_LEAVES = Leaves()
MAX_LEAVES = 15
_SMALL_STORE = {"object-store-memory": "200000000"}  # bytes; by default Ray takes 30 % of memory


def settled_leaves(cluster: dict[str, Any] | None) -> Leaves | None:
    """The leaves that an existing RayCluster was made for."""
    annotations = (cluster or {}).get("metadata", {}).get("annotations") or {}
    text = annotations.get(names.LEAVES_ANNOTATION)
    if text is None:
        return None
    found = json.loads(text)
    rollout = tuple((leaf, count) for leaf, count in found["rollout"])
    return Leaves(tuple(found["trainer"]), rollout, tuple(found["reserved"]))


def ray_cluster(
    job: dict[str, Any],
    spec: GRPOJobSpec,
    pool: RolloutPoolSpec,
    settings: OperatorSettings,
    suspend: bool,
    leaves: Leaves = NO_LEAVES,
) -> RayCluster:
    """The one RayCluster of a job: head, controller, training pool, rollout pool."""
    name = job["metadata"]["name"]
    pods = PodBuilder(name, spec, settings, leaves)
    trainer = spec.trainer
    resources = {"resources": trainer_ray_resources(trainer.gpus_per_node)}
    cpu = _SMALL_STORE if trainer.device == Device.CPU else {}
    groups = [
        _group(names.CONTROLLER, 1, pods.controller(), cpu),
        _group(names.TRAINER, trainer.nodes, pods.trainer(), cpu | resources),
    ]
    hosts = pool.engine.nodes_per_engine
    for group, leaf, engines in rollout_groups(pool, leaves):
        groups.append(_group(group, engines, pods.rollout(pool, leaf), {}, hosts))
    head = HeadGroup(
        ray_start_params={"num-cpus": "0", "dashboard-host": "0.0.0.0"} | cpu, template=pods.head()
    )
    return RayCluster(
        metadata=metadata(job, name, cluster_labels(spec.scheduling))
        | {"annotations": {names.LEAVES_ANNOTATION: json.dumps(asdict(leaves))}},
        spec=RayClusterSpec(
            ray_version=RAY_VERSION,
            suspend=suspend,
            upgrade_strategy={"type": spec.upgrade_strategy},
            head_group_spec=head,
            worker_group_specs=groups,
        ),
    )


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


def job_config_map(job: dict[str, Any], spec: GRPOJobSpec) -> dict[str, Any]:
    """What the pods read as /etc/grpo/job.json."""
    meta = job["metadata"]
    name, namespace = meta["name"], meta["namespace"]
    config = {
        "name": name,
        "namespace": namespace,
        # Suspension is told over HTTP; it must not change the files of the pods.
        "spec": spec.model_copy(update={"suspend": False}).wire(),
        "rolloutService": f"{names.rollout_service(name)}.{namespace}.svc.cluster.local",
        # The uid keeps a new job of an old name from resuming the old one's checkpoints.
        "store": f"{STORE_MOUNT}/{namespace}-{name}-{meta['uid'][:8]}",
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, names.job_config(name)),
        "data": {"job.json": json.dumps(config, sort_keys=True)},
    }


def rollout_service(job: dict[str, Any], pool: RolloutPoolSpec) -> dict[str, Any]:
    """Headless service over all engines, ready or not: the controller asks each agent."""
    name = job["metadata"]["name"]
    first = {names.HOST_INDEX: "0"} if pool.engine.nodes_per_engine > 1 else {}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job, names.rollout_service(name)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.labels(name, names.ROLLOUT) | first,
            "ports": [
                {"name": "engine", "port": ENGINE_PORT, "protocol": "TCP"},
                {"name": "agent", "port": AGENT_PORT, "protocol": "TCP"},
            ],
        },
    }


def rollout_groups(pool: RolloutPoolSpec, leaves: Leaves) -> list[tuple[str, str | None, int]]:
    """(worker group, its leaf, its engines): one group a leaf, or one for all engines.

    Kueue takes 18 pod sets: head, controller, trainer, and 15 leaves.
    """
    if 0 < len(leaves.rollout) <= MAX_LEAVES:
        return [(names.leaf_group(leaf), leaf, count) for leaf, count in leaves.rollout]
    return [(names.ROLLOUT, None, pool.replicas)]


def engine_services(
    job: dict[str, Any], pool: RolloutPoolSpec, leaves: Leaves = NO_LEAVES
) -> list[dict[str, Any]]:
    """A name for the first host of each engine of several hosts: the others meet there."""
    if pool.engine.nodes_per_engine == 1:
        return []
    name = job["metadata"]["name"]
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(job, names.engine_service(name, group, index)),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": names.labels(name, names.ROLLOUT)
                | {names.GROUP: group, names.REPLICA_INDEX: str(index), names.HOST_INDEX: "0"},
                "ports": [{"name": "rendezvous", "port": names.RENDEZVOUS_PORT, "protocol": "TCP"}],
            },
        }
        for group, _, engines in rollout_groups(pool, leaves)
        for index in range(engines)
    ]


def owned_pool(job: dict[str, Any], spec: GRPOJobSpec) -> dict[str, Any]:
    """The RolloutPool that shows, and scales, the job's engines."""
    name = job["metadata"]["name"]
    pool = spec.rollout.template.wire() | {"modelPath": spec.model.path}
    return {
        "apiVersion": API_VERSION,
        "kind": "RolloutPool",
        "metadata": metadata(job, names.rollout_pool(name)),
        "spec": pool,
    }


def with_hash(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with its own digest as an annotation, to skip needless writes."""
    digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()[:32]
    meta = manifest["metadata"]
    annotations = (meta.get("annotations") or {}) | {names.HASH_ANNOTATION: digest}
    return manifest | {"metadata": meta | {"annotations": annotations}}


def is_current(manifest: dict[str, Any], observed: dict[str, Any] | None) -> bool:
    """Does the observed object carry the digest of ``manifest`` (from with_hash)?"""
    if observed is None:
        return False
    annotations = observed["metadata"].get("annotations") or {}
    wanted = manifest["metadata"]["annotations"][names.HASH_ANNOTATION]
    return bool(annotations.get(names.HASH_ANNOTATION) == wanted)
