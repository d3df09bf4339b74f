"""Pods of a job or pool as needs for the feasibility check (pure)."""

from grpo_operator.api.base import Device, Resources
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec, RolloutTemplate
from grpo_operator.plan.capacity.feasibility import PodRequest, quantity

HEAD_RESOURCES = Resources(cpu="200m", memory="2Gi")
AGENT_RESOURCES = Resources(cpu="50m", memory="1Gi")


def job_needs(spec: GRPOJobSpec, own_pool: RolloutTemplate | None) -> list[PodRequest]:
    """Every pod of a job, by pool, with the field that sets its number."""
    trainer, controller = spec.trainer, spec.controller
    gpus = trainer.gpus_per_node if trainer.device == Device.CUDA else 0
    parts = [trainer.resources, AGENT_RESOURCES]
    needs = [
        _need("head", "spec.controller", 1, [HEAD_RESOURCES], 0, controller.node_selector),
        _need("controller", "spec.controller", 1, [controller.resources], 0, controller.node_selector),
        _need("trainer", "spec.trainer.nodes", trainer.nodes, parts, gpus, trainer.node_selector),
    ]
    if own_pool is None:
        return needs
    return [*needs, _engines(own_pool, "spec.rollout.template.replicas", spec.shares_gpus)]


def pool_needs(spec: RolloutPoolSpec) -> list[PodRequest]:
    """Every pod of a RolloutPool without a job."""
    return [
        _need("head", "spec.replicas", 1, [HEAD_RESOURCES], 0, {}),
        _engines(spec, "spec.replicas"),
    ]


def _engines(pool: RolloutTemplate, field_name: str, shares_gpus: bool = False) -> PodRequest:
    own = pool.engine.device == Device.CUDA and not shares_gpus
    gpus = pool.engine.gpus_per_node if own else 0
    pods = pool.replicas * pool.engine.nodes_per_engine
    return _need("rollout", field_name, pods, [pool.resources, AGENT_RESOURCES], gpus, pool.node_selector)


def _need(
    pool: str, field_name: str, count: int, parts: list[Resources], gpus: int, selector: dict[str, str]
) -> PodRequest:
    cpu = sum(quantity(part.cpu) for part in parts)
    memory = int(sum(quantity(part.memory) for part in parts))
    return PodRequest(pool, field_name, count, cpu, memory, gpus, selector)
