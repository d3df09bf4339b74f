"""Our Megatron-Core model against transformers' DeepseekV3 on the same weights (one rank)."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from grpo_operator.api.layout import Layout
from grpo_worker.megatron import weights
from grpo_worker.megatron.initialise import weight_reader
from grpo_worker.megatron.model import build_gpt, initialize_parallel
from grpo_worker.megatron.presets import model_config


def difference() -> float:
    """Largest difference of any logit over 2 x 96 tokens, fp32."""
    hf = model_config("preset:tiny-moe")
    draw = weight_reader("preset:tiny-moe", hf, seed=5)

    def read(name: str) -> torch.Tensor:
        # The preset starts with equal biases; the routing must agree with unequal ones too.
        if name.endswith("e_score_correction_bias"):
            return torch.linspace(-0.2, 0.2, hf["n_routed_experts"])
        return draw(name)

    layout = Layout(world=1)
    initialize_parallel(layout, 0)
    ours = build_gpt(hf, layout).eval()
    weights.load(ours, read)
    theirs = _transformers(hf, read)
    ids = torch.randint(0, hf["vocab_size"], (2, 96), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(96).expand(2, -1).contiguous()
    with torch.no_grad():
        return float((ours(ids, positions, None) - theirs(ids).logits).abs().max())


def _transformers(hf: dict[str, Any], read: Callable[[str], torch.Tensor]) -> DeepseekV3ForCausalLM:
    scaling = {k: v for k, v in hf["rope_scaling"].items() if k != "type"}
    known = {k: v for k, v in hf.items() if k not in ("rope_scaling", "rope_theta", "architectures")}
    config = DeepseekV3Config(**known, rope_parameters=scaling, attn_implementation="eager")
    model = DeepseekV3ForCausalLM(config).eval()
    state = {}
    for name in model.state_dict():
        prefix, _, part = name.rpartition("experts.")
        if part == "gate_up_proj":  # transformers keeps all experts in one tensor
            pairs = [
                torch.cat([read(f"{prefix}experts.{e}.{p}_proj.weight") for p in ("gate", "up")])
                for e in range(hf["n_routed_experts"])
            ]
            state[name] = torch.stack(pairs)
        elif part == "down_proj":
            state[name] = torch.stack(
                [read(f"{prefix}experts.{e}.down_proj.weight") for e in range(hf["n_routed_experts"])]
            )
        else:
            state[name] = read(name)
    model.load_state_dict(state)
    return model
