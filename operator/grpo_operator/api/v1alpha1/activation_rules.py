"""Rules for the trainer's fields about activations: what is computed again, and what waits in host memory."""

from typing import TYPE_CHECKING

from grpo_operator.api.rules import Rule
from grpo_operator.api.v1alpha1.offload import RECOMPUTED, OffloadModule, goes_with
from grpo_operator.api.v1alpha1.recompute import RecomputeModule, are_distinct

if TYPE_CHECKING:
    from grpo_operator.api.v1alpha1.trainer import TrainerSpec


def _without_modules(cel: str) -> str:
    """Return a condition on recomputeModules that holds where they are not set."""
    return f"!has(self.recomputeModules) || {cel}"


RECOMPUTE_RULES: tuple[Rule["TrainerSpec"], ...] = (
    Rule(
        _without_modules("self.recompute == 'selective'"),
        "recomputeModules needs recompute selective: set recompute to selective, or remove recomputeModules",
        lambda trainer: trainer.recompute_modules is None or trainer.recompute == "selective",
    ),
    Rule(
        "!has(self.recomputeLayers) || self.recompute == 'full'",
        "recomputeLayers needs recompute full: set recompute to full, or remove recomputeLayers",
        lambda trainer: trainer.recompute_layers is None or trainer.recompute == "full",
    ),
    Rule(
        _without_modules(
            "(self.recomputeModules.all(m, self.recomputeModules.exists_one(n, n == m))"
            " && (!('moe' in self.recomputeModules) || (!('moe_act' in self.recomputeModules)"
            " && !('shared_experts' in self.recomputeModules))))"
        ),
        "recomputeModules recomputes a module twice: name each once, and with moe, the whole layer of "
        "experts, neither moe_act nor shared_experts",
        lambda trainer: are_distinct(tuple(trainer.recompute_modules or ())),
    ),
    Rule(
        _without_modules(
            "!('moe_act' in self.recomputeModules) || (self.device == 'cuda' && self.kernels != 'local')"
        ),
        "recomputeModules moe_act needs the experts of a layer in one product, which only Transformer "
        "Engine's kernels on device cuda compute: remove moe_act, or set kernels to auto or "
        "transformer-engine",
        lambda trainer: (
            RecomputeModule.MOE_ACT not in (trainer.recompute_modules or ()) or trainer.groups_experts
        ),
    ),
)


def _without_offload(cel: str) -> str:
    """Return a condition on offload.activations that holds where they are not set."""
    return f"!has(self.offload.activations) || {cel}"


def _both(recomputed: RecomputeModule, offloaded: OffloadModule) -> str:
    return f"('{recomputed}' in self.recomputeModules && '{offloaded}' in self.offload.activations)"


OFFLOAD_RULES: tuple[Rule["TrainerSpec"], ...] = (
    Rule(
        _without_offload("(self.device == 'cuda' && self.kernels != 'local')"),
        "offload.activations needs device cuda and Transformer Engine's kernels: set kernels to auto or "
        "transformer-engine, or remove activations",
        lambda trainer: trainer.offload.activations is None or trainer.groups_experts,
    ),
    Rule(
        _without_offload("self.recompute != 'full'"),
        "offload.activations needs recompute none, selective or auto: full keeps no activations of modules: "
        "set recompute, or remove activations",
        lambda trainer: trainer.offload.activations is None or trainer.recompute != "full",
    ),
    Rule(
        _without_offload("!self.moe.overlapCommunication"),
        "offload.activations follows the order of whole layers, which moe.overlapCommunication runs in "
        "parts: remove activations, or set overlapCommunication to false",
        lambda trainer: trainer.offload.activations is None or not trainer.moe.overlap_communication,
    ),
    Rule(
        _without_offload(
            "!has(self.recomputeModules) || !("
            + " || ".join(_both(module, other) for module, others in RECOMPUTED.items() for other in others)
            + ")"
        ),
        "offload.activations names a module whose activations recomputeModules drops or needs: qkv_linear "
        "with layernorm, qkv_linear or core_attn with mla_up_proj, core_attn with core_attn, expert_fc1 or "
        "moe_act with moe: remove one of the two",
        lambda trainer: all(
            goes_with(module, trainer.recompute_modules or ()) for module in trainer.offload.activations or ()
        ),
    ),
)
