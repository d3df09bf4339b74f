"""How much of the GPUs' peak a step uses (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Name, phase, passes: forward, and backward twice as long; computing layers again is no useful work.
_MEASURED = (("actor", "update_actor", 3), ("actor_infer", "old_log_prob", 1))


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """``parameters``: that one token is multiplied with; ``attention``: (query-key + value width) x
    heads x layers."""

    parameters: int
    attention: int

    def forward(self, lengths: Sequence[int]) -> float:
        """Floating-point operations of causal forwards over sequences of these lengths."""
        tokens, squares = sum(lengths), sum(length**2 for length in lengths)
        return 2.0 * self.parameters * tokens + float(self.attention * squares)


def attention_width(hf: Mapping[str, Any]) -> int:
    """``ModelFlops.attention`` of a config.json."""
    if "kv_lora_rank" in hf:
        head = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"] + hf["v_head_dim"]
    else:
        head = 2 * (hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"])
    return int(head * hf["num_attention_heads"] * hf["num_hidden_layers"])


def utilisation(
    flops: ModelFlops, lengths: Sequence[int], seconds: Mapping[str, float], gpus: int, peak: float | None
) -> dict[str, float]:
    """verl's perf/mfu/actor and perf/mfu/actor_infer, and TFLOP/s of a GPU besides.

    seconds: the step's ``timing_s/...``. peak: FLOP/s of one GPU, None where nobody knows it.
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
