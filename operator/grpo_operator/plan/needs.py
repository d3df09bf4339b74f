"""Pods of a job as needs for the feasibility check (pure)."""

from grpo_operator.api.base import Device, Resources
from grpo_operator.api.grpojob import GRPOJobSpec
from grpo_operator.plan.feasibility import PodNeed, quantity

HEAD_RESOURCES = Resources(cpu="200m", memory="2Gi")
AGENT_RESOURCES = Resources(cpu="50m", memory="1Gi")


def pod_needs(spec: GRPOJobSpec, rollout_replicas: int) -> list[PodNeed]:
    """Every pod of the job, by pool, with the field that sets its number."""
    trainer, pool, controller = spec.trainer, spec.rollout.template, spec.controller
    trainer_gpus = trainer.gpus_per_node if trainer.device == Device.CUDA else 0
    engine_gpus = pool.engine.gpus_per_node if pool.engine.device == Device.CUDA else 0
    return [
        _need("head", "spec.controller", 1, [HEAD_RESOURCES], 0, controller.node_selector),
        _need("controller", "spec.controller", 1, [controller.resources], 0, controller.node_selector),
        _need(
            "trainer", "spec.trainer.nodes", trainer.nodes, [trainer.resources, AGENT_RESOURCES],
            trainer_gpus, trainer.node_selector,
        ),
        _need(
            "rollout", "spec.rollout.template.replicas", rollout_replicas * pool.engine.nodes_per_engine,
            [pool.resources, AGENT_RESOURCES], engine_gpus, pool.node_selector,
        ),
    ]  # fmt: skip


def _need(
    pool: str, field_name: str, count: int, parts: list[Resources], gpus: int, selector: dict[str, str]
) -> PodNeed:
    cpu = sum(quantity(part.cpu) for part in parts)
    memory = int(sum(quantity(part.memory) for part in parts))
    return PodNeed(pool, field_name, count, cpu, memory, gpus, selector)
