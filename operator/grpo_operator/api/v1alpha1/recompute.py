"""Activations that a trainer's rank computes again in the backward pass instead of keeping them."""

from dataclasses import dataclass
from enum import StrEnum


class RecomputeKind(StrEnum):
    """Kind of recomputation: of nothing, of modules of each layer, or of whole layers."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


class RecomputeModule(StrEnum):
    """Module of a layer that can be recomputed alone, under Megatron-Core's name."""

    LAYERNORM = "layernorm"
    MLA_UP_PROJ = "mla_up_proj"
    MOE_ACT = "moe_act"
    MLP = "mlp"
    MOE = "moe"
    SHARED_EXPERTS = "shared_experts"
    CORE_ATTN = "core_attn"


_INSIDE_MOE = (RecomputeModule.MOE_ACT, RecomputeModule.SHARED_EXPERTS)  # parts of the module ``moe``


def are_distinct(modules: tuple[RecomputeModule, ...]) -> bool:
    """Return whether no module is recomputed twice, by its name or as a part of another one."""
    twice = RecomputeModule.MOE in modules and any(module in modules for module in _INSIDE_MOE)
    return len(set(modules)) == len(modules) and not twice


@dataclass(frozen=True, slots=True)
class Recompute:
    """Recomputation of activations on each rank.

    ``modules``: of each layer, if ``kind`` is selective. ``layers``: so many of the first layers of each
    pipeline stage (of each model chunk with virtual stages), if ``kind`` is full; None: all. Raises
    ValueError for values that do not go together.
    """

    kind: RecomputeKind
    modules: tuple[RecomputeModule, ...] = ()
    layers: int | None = None

    def __post_init__(self) -> None:
        if bool(self.modules) != (self.kind is RecomputeKind.SELECTIVE):
            raise ValueError(
                f"recompute={self.kind} with recomputeModules=[{', '.join(self.modules)}]: selective needs "
                "modules, and the other kinds have none"
            )
        if self.layers is not None and (self.kind is not RecomputeKind.FULL or self.layers < 1):
            raise ValueError(
                f"recompute={self.kind} with recomputeLayers={self.layers}: only full counts layers, from 1"
            )
        if not are_distinct(self.modules):
            raise ValueError(
                f"recomputeModules=[{', '.join(self.modules)}] recomputes a module twice: name each once, "
                "and with moe neither moe_act nor shared_experts"
            )

    def __str__(self) -> str:
        """Return the form in which plans show it."""
        if self.modules:
            return f"{self.kind}: {', '.join(self.modules)}"
        return f"{self.kind}, {self.layers} layers of each stage" if self.layers else str(self.kind)

    def of_layer(self, place: int) -> "Recompute":
        """Return what is recomputed of the layer at ``place`` in its model chunk, counted from 0."""
        if self.layers is None:
            return self
        return FULL if place < self.layers else NOTHING


FULL, NOTHING = Recompute(RecomputeKind.FULL), Recompute(RecomputeKind.NONE)
