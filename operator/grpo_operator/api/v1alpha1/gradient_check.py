"""Check for silent data corruption: gradients that are computed twice."""

from typing import TYPE_CHECKING

from pydantic import Field

from grpo_operator.api.base import Device, Model
from grpo_operator.api.rules import Rule

if TYPE_CHECKING:
    from grpo_operator.api.v1alpha1.trainer import TrainerSpec

GRADIENT_CHECK_RULES: tuple[Rule["TrainerSpec"], ...] = (
    Rule(
        "!has(self.gradientCheck) || self.device == 'cpu' || self.deterministic",
        "gradientCheck compares bits, which differ from pass to pass on GPUs without deterministic: set "
        "deterministic to true, or remove gradientCheck",
        lambda trainer: (
            trainer.gradient_check is None or trainer.device is Device.CPU or trainer.deterministic
        ),
    ),
)


class GradientCheckSpec(Model):
    """Steps whose policy gradients are computed twice and compared bit for bit, before the weights change."""

    every_steps: int = Field(
        ge=1,
        le=10**6,
        description="number of steps between checks. Each computes the gradients of the step's first "
        "mini-batch a second time",
    )

    def due(self, step: int) -> bool:
        """Return whether ``step`` is checked."""
        return step % self.every_steps == 0
