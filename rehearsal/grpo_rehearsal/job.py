"""The job of a manifest as the operator creates it: plan, rendered objects, and the controller's file."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_operator.api.job_config import JobConfig
from grpo_operator.api.names import ROLLOUT, TRAINER, owner_of
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.cli.manifest import Manifest
from grpo_operator.plan.planner.resolve import JobPlan, resolve
from grpo_operator.plan.planner.settled import with_layout, with_resources
from grpo_operator.plan.status.grpojob import layout_status
from grpo_operator.render.config_map import job_config_map
from grpo_operator.render.ray_cluster import job_cluster
from grpo_operator.settings import OperatorSettings

_IDENTITY = {"namespace": "rehearsal", "uid": "00000000-0000-0000-0000-000000000000", "generation": 1}
_SETTINGS = OperatorSettings("trainer:rehearsal", "rollout:rehearsal", namespace="rehearsal")


@dataclass(frozen=True, slots=True)
class RehearsedJob:
    """A planned and rendered job. ``cluster``: its RayCluster. ``config``: content of its job.json."""

    name: str
    spec: GRPOJobSpec
    pool: RolloutTemplate
    plan: JobPlan
    cluster: dict[str, Any]
    config: JobConfig

    @property
    def engine_arguments(self) -> dict[str, str]:
        """Return the arguments of the rendered engine's server; flags without a value map to ""."""
        command = _container(self.cluster, ROLLOUT, "engine")["args"][0]
        found = re.findall(r"--([a-z0-9-]+)(?: ([^\s-]\S*))?", command)
        return dict(found)

    def memory_of(self, group: str, container: str) -> str:
        """Return the memory limit of a container, as rendered; "" without a limit."""
        limits = _container(self.cluster, group, container).get("resources", {}).get("limits", {})
        return str(limits.get("memory", ""))


def read_job(
    manifest: Path, engines: int | None = None, prompts: int | None = None, routing_replay: bool = False,
    running: int | None = None, checkpoint_every: int | None = None,
) -> RehearsedJob:  # fmt: skip
    """Return the first GRPOJob of a manifest.

    ``engines``, ``prompts``, ``running``, ``checkpoint_every``: number of engines, of prompts of a step, of
    requests that run in an engine, and of steps between two checkpoints, instead of its own.
    ``routing_replay``: replay the engines' routing, whatever the manifest says.

    Raises ValueError, RefusedError or ValidationError that names the problem.
    """
    found = Manifest.read(manifest)
    job = found.objects[0] | {"metadata": found.objects[0]["metadata"] | _IDENTITY}
    spec = GRPOJobSpec.model_validate(job["spec"])
    pool = found.pool_of(spec)
    if engines is not None:
        pool = pool.model_copy(
            update={"replicas": engines, "min_available": min(engines, pool.min_available)}
        )
    if prompts is not None:
        spec = _with_prompts(spec, prompts)
    if running is not None:
        pool = _with_running(pool, running)
    if checkpoint_every is not None:
        spec = _with_checkpoints(spec, checkpoint_every)
    if routing_replay:
        spec, pool = _with_routing_replay(spec, pool)
    plan = resolve(spec, pool)
    layout = layout_status(plan)
    spec, pool = with_layout(spec, layout), with_resources(pool, layout)
    cluster = job_cluster(job, spec, pool, _SETTINGS, False).wire()
    config_map = job_config_map(job, spec, owner_of(job).rollout_service, pool)
    config = JobConfig.model_validate(json.loads(config_map["data"]["job.json"]))
    return RehearsedJob(str(job["metadata"]["name"]), spec, pool, plan, cluster, config)


def rollout_names(job: RehearsedJob) -> list[str]:
    """Return the names of the first pods of all engines."""
    return [f"{job.name}-{ROLLOUT}-{number}" for number in range(job.pool.replicas)]


def trainer_names(job: RehearsedJob) -> list[str]:
    """Return the names of the training pods."""
    return [f"{job.name}-{TRAINER}-{number}" for number in range(job.spec.trainer.nodes)]


def _with_prompts(spec: GRPOJobSpec, prompts: int) -> GRPOJobSpec:
    data = spec.data.model_copy(update={"train_batch_size": prompts})
    mini = min(spec.trainer.mini_batch_size, prompts)
    trainer = spec.trainer.model_copy(update={"mini_batch_size": mini})
    return GRPOJobSpec.model_validate(spec.model_copy(update={"data": data, "trainer": trainer}).wire())


def _with_running(pool: RolloutTemplate, running: int) -> RolloutTemplate:
    engine = pool.engine.model_copy(update={"max_running_requests": running})
    return RolloutTemplate.model_validate(pool.model_copy(update={"engine": engine}).wire())


def _with_checkpoints(spec: GRPOJobSpec, every: int) -> GRPOJobSpec:
    checkpoint = spec.checkpoint.model_copy(update={"every_steps": every})
    return GRPOJobSpec.model_validate(spec.model_copy(update={"checkpoint": checkpoint}).wire())


def _with_routing_replay(spec: GRPOJobSpec, pool: RolloutTemplate) -> tuple[GRPOJobSpec, RolloutTemplate]:
    engine = pool.engine.model_copy(update={"return_routed_experts": True})
    pool = pool.model_copy(update={"engine": engine})
    algorithm = spec.algorithm.model_copy(update={"routing_replay": True})
    rollout = spec.rollout
    if rollout.template is not None:
        rollout = rollout.model_copy(update={"template": pool})
    spec = spec.model_copy(update={"algorithm": algorithm, "rollout": rollout})
    return GRPOJobSpec.model_validate(spec.wire()), pool


def _container(cluster: dict[str, Any], group: str, name: str) -> dict[str, Any]:
    for entry in cluster["spec"]["workerGroupSpecs"]:
        if entry["groupName"].startswith(group):
            pod = entry["template"]["spec"]
            for container in [*pod["containers"], *pod.get("initContainers", [])]:
                if container["name"] == name:
                    return dict(container)
    raise KeyError(f"the RayCluster has no container {name} in a group {group}")
