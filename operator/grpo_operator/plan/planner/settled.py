"""Specs of accepted jobs, completed by the plan in their status (pure)."""

from typing import Any

from grpo_operator.api.base import Resources
from grpo_operator.api.v1alpha1.grpojob import GRPOJobSpec
from grpo_operator.api.v1alpha1.rolloutpool import RolloutTemplate
from grpo_operator.api.v1alpha1.status import LayoutStatus, PlannedResources, RecomputeStatus
from grpo_operator.api.v1alpha1.trainer import ParallelismSpec
from grpo_operator.plan.planner.deadlines import completed_deadlines, planned_deadlines
from grpo_operator.plan.planner.resources import completed_job, completed_template

# Defaults of jobs that were accepted before resources were planned: their pods must not change.
_BEFORE = PlannedResources(
    controller=Resources(cpu="1", memory="2Gi"),
    trainer=Resources(cpu="1", memory="4Gi"),
    engine=Resources(cpu="1", memory="4Gi"),
    shared_memory="64Gi",
    routed_experts_gibibytes=4,
)


def with_layout(spec: GRPOJobSpec, layout: LayoutStatus) -> GRPOJobSpec:
    """Return the spec with explicit sizes in place of ``auto``, as the ranks read it.

    It gets the resources and deadlines that were planned when the job was accepted.
    """
    sizes = {name: getattr(layout, name) for name in ParallelismSpec.model_fields if name != "auto"}
    trainer = spec.trainer.model_copy(
        update={
            "parallelism": ParallelismSpec(**sizes),
            "offload": layout.offload or spec.trainer.offload,
            **_recompute_fields(layout.recompute),
        }
    )
    completed = completed_deadlines(
        spec.model_copy(update={"trainer": trainer}), layout.deadlines or planned_deadlines(None)
    )
    return completed_job(completed, layout.resources or _BEFORE)


def _recompute_fields(planned: RecomputeStatus | None) -> dict[str, Any]:
    """Return the trainer's fields in place of those that the plan completed."""
    if planned is None:  # accepted before anything was left to the planner
        return {}
    return {
        "recompute": planned.kind.value,
        "recompute_modules": planned.modules,
        "recompute_layers": planned.layers,
    }


def with_resources(pool: RolloutTemplate, layout: LayoutStatus) -> RolloutTemplate:
    """Return the job's own pool with the resources that were planned when the job was accepted."""
    return completed_template(pool, layout.resources or _BEFORE)
