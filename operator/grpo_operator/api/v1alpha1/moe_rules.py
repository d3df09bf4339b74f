"""Rules for the trainer's fields about experts: how tokens reach them, and what runs beside it."""

from typing import TYPE_CHECKING

from grpo_operator.api.base import Device
from grpo_operator.api.rules import Rule
from grpo_operator.api.v1alpha1.moe import TokenDispatcher
from grpo_operator.api.v1alpha1.recompute import RecomputeModule

if TYPE_CHECKING:
    from grpo_operator.api.v1alpha1.trainer import TrainerSpec


def _layout_overlaps(trainer: "TrainerSpec") -> bool:
    """Return whether the device and the given sizes allow moe.overlapCommunication."""
    sizes = trainer.parallelism
    stages = sizes.pipeline == 1 or sizes.virtual_pipeline > 1
    return trainer.device is Device.CUDA and (sizes.auto or (sizes.expert > 1 and stages))


MOE_RULES: tuple[Rule["TrainerSpec"], ...] = (
    Rule(
        "self.moe.dispatcher != 'deepep' || (self.device == 'cuda' && self.kernels != 'local'"
        " && (self.parallelism.auto || self.parallelism.expert > 1))",
        "moe.dispatcher deepep needs device cuda, Transformer Engine's kernels and parallelism.expert > 1:"
        " change these fields, or set dispatcher to auto or alltoall",
        lambda trainer: (
            trainer.moe.dispatcher is not TokenDispatcher.DEEPEP
            or (trainer.groups_experts and (trainer.parallelism.auto or trainer.parallelism.expert > 1))
        ),
    ),
    Rule(
        "!self.moe.overlapCommunication || (self.device == 'cuda' && (self.parallelism.auto"
        " || (self.parallelism.expert > 1"
        " && (self.parallelism.pipeline == 1 || self.parallelism.virtualPipeline > 1))))",
        "moe.overlapCommunication needs device cuda, parallelism.expert > 1 and, with pipeline > 1,"
        " virtualPipeline > 1: change these fields, or set overlapCommunication to false",
        lambda trainer: not trainer.moe.overlap_communication or _layout_overlaps(trainer),
    ),
    Rule(
        "!self.moe.overlapCommunication || (self.recompute != 'full'"
        " && (!has(self.recomputeModules) || !('moe' in self.recomputeModules)))",
        "moe.overlapCommunication runs layers in parts, which excludes recompute full and recomputeModules"
        " moe: set recompute to none, selective or auto, or overlapCommunication to false",
        lambda trainer: (
            not trainer.moe.overlap_communication
            or (trainer.recompute != "full" and RecomputeModule.MOE not in (trainer.recompute_modules or ()))
        ),
    ),
)
