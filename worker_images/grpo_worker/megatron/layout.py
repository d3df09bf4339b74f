"""The parallel layout of the training pool: sizes of each axis, checked at construction."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of Megatron-Core's axes. ``world`` = number of ranks.

    Dense weights: world = tensor x pipeline x context x data.
    Expert weights: world = expert_tensor x expert x pipeline x expert_data.
    """

    world: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1

    def __post_init__(self) -> None:
        dense = self.tensor * self.pipeline * self.context
        if self.world % dense:
            raise ValueError(
                f"world size {self.world} is not a multiple of tensor x pipeline x context = {dense}"
            )
        experts = self.expert * self.expert_tensor * self.pipeline
        if self.world % experts:
            raise ValueError(
                f"world size {self.world} is not a multiple of expert x expertTensor x pipeline = {experts}"
            )

    @property
    def data(self) -> int:
        """Number of model replicas that see different samples."""
        return self.world // (self.tensor * self.pipeline * self.context)
