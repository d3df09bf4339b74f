"""Number formats of gradients and of Adam's moments."""

from enum import StrEnum

from pydantic import Field

from grpo_operator.api.base import Model


class OptimizerDtype(StrEnum):
    """Number format of gradients or of optimizer state."""

    FP32 = "fp32"
    BF16 = "bf16"

    @property
    def width(self) -> int:
        """Return the bytes of a value."""
        return 4 if self is OptimizerDtype.FP32 else 2


class OptimizerDtypes(Model):
    """Number formats of gradients and of Adam's moments, with Megatron-Core's names.

    With any other than fp32, Megatron-Core's precision-aware optimizer runs. The main weights stay fp32.
    """

    main_grads_dtype: OptimizerDtype = Field(
        OptimizerDtype.FP32,
        description="gradients, which are accumulated over micro-batches and reduced over data-parallel GPUs",
    )
    exp_avg_dtype: OptimizerDtype = Field(OptimizerDtype.FP32, description="Adam's first moment")
    exp_avg_sq_dtype: OptimizerDtype = Field(OptimizerDtype.FP32, description="Adam's second moment")

    @property
    def narrow(self) -> dict[str, OptimizerDtype]:
        """Return the fields that are not fp32."""
        return {name: dtype for name, dtype in self if dtype is not OptimizerDtype.FP32}
