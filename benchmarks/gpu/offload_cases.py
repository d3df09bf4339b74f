"""Updates whose activations activation_offload.py offloads, with what the planner says of them (pure)."""

from dataclasses import dataclass

from update_cases import FP8, MICRO_BATCHES, UpdateCase

from grpo_operator.api.v1alpha1.offload import OffloadModule
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.activations import Workload
from grpo_operator.plan.planner.training.memory import StageMemory, of_precision, stage_memory
from grpo_operator.plan.planner.training.offload import offloadable

NORMS = (OffloadModule.ATTN_NORM, OffloadModule.MLP_NORM)
ATTENTION = (OffloadModule.CORE_ATTN, OffloadModule.ATTN_PROJ)
EXPERTS = (OffloadModule.EXPERT_FC1, OffloadModule.MOE_ACT)


@dataclass(frozen=True, slots=True)
class OffloadCase:
    """An update, and the modules whose activations it offloads."""

    of: UpdateCase
    modules: tuple[OffloadModule, ...]

    def planned(self, offload: bool) -> StageMemory:
        """Return the planned memory, with the activations on the GPU or offloaded."""
        modules = self.modules if offload else ()
        work = Workload(self.of.tokens, 1, MICRO_BATCHES, self.of.recomputed, offloaded=modules)
        precision = of_precision(self.of.precision)
        (stage,) = stage_memory(ModelShape.from_hf(self.of.hf), self.of.layout, work, precision=precision)
        return stage

    def __str__(self) -> str:
        return f"{self.of}, {' '.join(self.modules)}"


def _all(case: UpdateCase) -> OffloadCase:
    """Return a case with all modules that the model has and does not recompute."""
    return OffloadCase(case, tuple(offloadable(ModelShape.from_hf(case.hf), case.recomputed)))


CASES = (
    *(OffloadCase(UpdateCase("slice", 4096), modules) for modules in (NORMS, ATTENTION, EXPERTS)),
    OffloadCase(UpdateCase("slice", 4096), (OffloadModule.QKV_LINEAR,)),
    _all(UpdateCase("slice", 4096)),
    _all(UpdateCase("slice", 8192, recompute="selective")),
    _all(UpdateCase("slice", 4096, precision=FP8)),
    _all(UpdateCase("slice", 4096, precision=FP8, recompute="selective")),
    _all(UpdateCase("qwen3-8b", 4096)),
    _all(UpdateCase("qwen3-8b", 8192, recompute="selective")),
    _all(UpdateCase("qwen3-moe", 4096)),
)
