"""Model FLOPs utilisation (MFU) of a step (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# (name, phase, passes): a backward pass counts as two forward passes; recomputation does not count.
_MEASURED = (("actor", "update_actor", 3), ("actor_infer", "old_log_prob", 1))


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Size of a model in terms of its floating-point operations.

    ``parameters``: those that are multiplied with each token; ``attention``: (query-key + value width) x
    heads x layers.
    """

    parameters: int
    attention: int

    def forward(self, lengths: Sequence[int]) -> float:
        """Return the floating-point operations of causal forward passes over sequences of these lengths."""
        tokens, squares = sum(lengths), sum(length**2 for length in lengths)
        return 2.0 * self.parameters * tokens + float(self.attention * squares)


def attention_width(hf: Mapping[str, Any]) -> int:
    """Return ``ModelFlops.attention`` of a config.json."""
    if "kv_lora_rank" in hf:
        head = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"] + hf["v_head_dim"]
    else:
        head = 2 * (hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])
    return int(head * hf["num_attention_heads"] * hf["num_hidden_layers"])


def utilisation(
    flops: ModelFlops, lengths: Sequence[int], seconds: Mapping[str, float], gpus: int, peak: float | None
) -> dict[str, float]:
    """Return verl's perf/mfu/actor and perf/mfu/actor_infer, and the TFLOP/s per GPU of both phases.

    seconds: the step's ``timing_s/...``. peak: FLOP/s of one GPU, None if it is unknown.
    """
    figures: dict[str, float] = {}
    once = flops.forward(lengths)
    for name, phase, passes in _MEASURED:
        spent = seconds.get(f"timing_s/{phase}")
        if not spent:
            continue
        rate = once * passes / spent / gpus
        figures[f"perf/tflops_per_gpu/{name}"] = rate / 1e12
        if peak is not None:
            figures[f"perf/mfu/{name}"] = rate / peak
    return figures
