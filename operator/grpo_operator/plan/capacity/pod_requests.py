"""Resource requests of the pods of a job or pool, for admission and the feasibility check (pure)."""

from grpo_operator.api.base import AGENT_RESOURCES, Device, Resources
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutPoolSpec, RolloutTemplate
from grpo_operator.api.v1alpha1.scheduling import SchedulingSpec
from grpo_operator.api.v1alpha1.trainer import TrainerSpec
from grpo_operator.plan.capacity.feasibility import PodRequest, quantity
from grpo_operator.plan.planner.host_memory import head_memory


def head_resources(ranks: int) -> Resources:
    """Return the resources of Ray's head, which keeps something of each rank."""
    return Resources(cpu="300m", memory=f"{head_memory(ranks) // 2**20}Mi")


def job_head_resources(spec: GRPOJobSpec) -> Resources:
    """Return the resources of a job's head."""
    return spec.head.resources.or_else(head_resources(spec.trainer.world))


def agent_resources(of: TrainerSpec | RolloutTemplate) -> Resources:
    """Return the resources of the agent in each pod of a pool."""
    return of.agent_resources.or_else(AGENT_RESOURCES)


def job_requests(spec: GRPOJobSpec, own_pool: RolloutTemplate | None) -> list[PodRequest]:
    """Return the requests of all pods of a job. ``own_pool``: None for a job that uses a shared pool."""
    trainer, controller = spec.trainer, spec.controller
    gpus = trainer.gpus_per_node if trainer.device == Device.CUDA else 0
    parts = [trainer.resources, agent_resources(trainer)]
    on_host = _on_host_network(spec.scheduling, gpus)
    requests = [
        _request("head", "spec.head", 1, [job_head_resources(spec)], 0, controller.node_selector),
        _request("controller", "spec.controller", 1, [controller.resources], 0, controller.node_selector),
        _request(
            "trainer", _trainer_field(trainer), trainer.pods, parts, gpus, trainer.node_selector, on_host
        ),
    ]
    if own_pool is None:
        return requests
    engines = _engines(own_pool, "spec.rollout.template.replicas", spec.scheduling, spec.shares_gpus)
    return [*requests, engines]


def pool_requests(spec: RolloutPoolSpec) -> list[PodRequest]:
    """Return the requests of all pods of a RolloutPool without a job."""
    return [
        _request("head", "spec.replicas", 1, [head_resources(0)], 0, {}),
        _engines(spec, "spec.replicas", spec.scheduling),
    ]


def _trainer_field(trainer: TrainerSpec) -> str:
    """Return the fields that set the number of training pods."""
    return "spec.trainer.nodes + spareNodes" if trainer.spare_nodes else "spec.trainer.nodes"


def _engines(
    pool: RolloutTemplate, field_name: str, scheduling: SchedulingSpec, shares_gpus: bool = False
) -> PodRequest:
    # Colocated engines use the GPUs of the training pods and request none.
    dedicated = pool.engine.device == Device.CUDA and not shares_gpus
    gpus = pool.engine.gpus_per_node if dedicated else 0
    pods = pool.replicas * pool.engine.nodes_per_engine
    parts = [pool.resources, agent_resources(pool)]
    on_host = _on_host_network(scheduling, gpus)
    return _request("rollout", field_name, pods, parts, gpus, pool.node_selector, on_host)


def _on_host_network(scheduling: SchedulingSpec, gpus: int) -> bool:
    return gpus > 0 and scheduling.rdma is not None and scheduling.rdma.host_network


def _request(
    pool: str, field_name: str, count: int, parts: list[Resources], gpus: int, selector: dict[str, str],
    host_network: bool = False,
) -> PodRequest:  # fmt: skip
    cpu = sum(quantity(part.cpu or "0") for part in parts)
    memory = int(sum(quantity(part.memory or "0") for part in parts))
    return PodRequest(pool, field_name, count, cpu, memory, gpus, selector, host_network)
