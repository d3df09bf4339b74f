"""Parallel layout of a training pool, with the axes of Megatron-Core 0.16.

The planner and the ranks share it, so that the ranks can initialise every layout that the planner accepts.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of Megatron-Core's parallel axes. ``world`` = number of ranks.

    Dense weights: world = tensor x pipeline x context x data.
    Expert weights: world = expert_tensor x expert x pipeline x expert_data.
    ``virtual_pipeline``: model chunks per stage (interleaved schedule); 1 = not interleaved.
    ``layers_in_first_stage``, ``layers_in_last_stage``: None = the same number as the other stages.

    Raises ValueError if ``world`` is not a multiple of the sizes' product.
    """

    world: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual_pipeline: int = 1
    layers_in_first_stage: int | None = None
    layers_in_last_stage: int | None = None

    def __post_init__(self) -> None:
        dense = self.tensor * self.pipeline * self.context
        if self.world % dense:
            raise ValueError(
                f"world size {self.world} is not a multiple of tensor x pipeline x context = {dense}: "
                "change parallelism or the number of GPUs"
            )
        experts = self.expert * self.expert_tensor * self.pipeline
        if self.world % experts:
            raise ValueError(
                f"world size {self.world} is not a multiple of expert x expertTensor x pipeline = {experts}: "
                "change parallelism or the number of GPUs"
            )

    @property
    def data(self) -> int:
        """Return the data-parallel size: the number of model replicas that train on different samples."""
        return self.world // (self.tensor * self.pipeline * self.context)

    @property
    def expert_data(self) -> int:
        """Return the number of copies of each expert's weights."""
        return self.world // (self.expert * self.expert_tensor * self.pipeline)

    def __str__(self) -> str:
        sizes = [f"TP{self.tensor}", f"PP{self.pipeline}", f"CP{self.context}", f"EP{self.expert}"]
        if self.expert_tensor != 1:
            sizes.append(f"ETP{self.expert_tensor}")
        if self.virtual_pipeline != 1:
            sizes.append(f"VPP{self.virtual_pipeline}")
        return " ".join([*sizes, f"DP{self.data}"])
