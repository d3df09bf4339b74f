"""Model families: what config.json says in either generation of files, and what is refused."""

from typing import Any

import pytest
from transformers import AutoConfig

from grpo_operator.plan.planner.model.shape import KNOWN
from grpo_worker.megatron.families.registry import family_of
from grpo_worker.model_files.config import canonical
from support.tiny_models import tiny_model

LLAMA3 = tiny_model("llama")["rope_scaling"]


def test_planner_and_trainer_know_the_same_families() -> None:
    for model_type in KNOWN:
        family_of(tiny_model(model_type)).check(tiny_model(model_type))
    with pytest.raises(ValueError, match=f"use one of {', '.join(KNOWN)}"):
        family_of({"model_type": "gpt2"})


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen2", "glm4_moe", "glm4_moe-no-norms"])
def test_files_of_transformers_5_mean_the_same(name: str) -> None:
    hf = tiny_model(name)
    saved = AutoConfig.for_model(**hf).to_dict()
    saved.pop("partial_rotary_factor", None)  # some releases keep it among the rotary parameters only
    found, family = canonical(saved), family_of(hf)
    assert "rope_parameters" in saved and "rope_parameters" not in found
    assert family_of(found) is family and family.fields(found) == family.fields(hf)
    assert family.rotary(found) == family.rotary(hf) and family.shapes(found) == family.shapes(hf)
    assert found["rope_theta"] == hf["rope_theta"]


@pytest.mark.parametrize(
    ("name", "changes", "text"),
    [
        ("llama", {"attention_bias": True}, "attention_bias=True of a llama model .* attention_bias=False"),
        ("llama", {"mlp_bias": True}, "mlp_bias=True of a llama model is not supported: use"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu' .* hidden_act='silu'"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2}}, "type 'linear' of a llama .* llama3"),
        ("llama", {"rope_scaling": LLAMA3 | {"low_freq_factor": 2}}, "rope_scaling.low_freq_factor=2 .* 1"),
        (
            "llama",
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 4096}},
            "original_max_position_embeddings=4096 of a llama .* use a model with 8192",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
            "config.json lacks low_freq_factor",
        ),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window=True of a qwen2 .* use_sliding_window=F"),
        ("qwen2", {"rope_scaling": {"type": "yarn", "factor": 4}}, "type 'yarn' of a qwen2 model .* without"),
        ("qwen3", {"attention_bias": True}, "attention_bias=True of a qwen3 model is not supported"),
        ("glm4_moe", {"norm_topk_prob": False}, "norm_topk_prob=false of a glm4_moe .* norm_topk_prob=true"),
        (
            "glm4_moe",
            {"n_group": 4, "topk_group": 4},
            r"num_experts_per_tok \(4\) must be 2 x topk_group \(4",
        ),
        ("glm4_moe", {"scoring_func": "softmax"}, "scoring_func='softmax': the routers of a glm4_moe model"),
        ("glm4_moe", {"num_experts_per_tok": 1}, "num_experts_per_tok=1: .* more experts per token"),
        ("glm4_moe", {"rope_scaling": {"type": "yarn"}}, "rope_scaling type 'yarn' of a glm4_moe model"),
        ("kimi_k2", {"norm_topk_prob": False}, "norm_topk_prob=false of a kimi_k2 model cannot be expressed"),
    ],
)
def test_what_megatron_core_cannot_express_is_refused(name: str, changes: dict[str, Any], text: str) -> None:
    hf = tiny_model(name) | changes
    with pytest.raises(ValueError, match=text):
        family_of(hf).check(hf)


def test_a_missing_field_is_named() -> None:
    hf = tiny_model("glm4_moe")
    del hf["partial_rotary_factor"]
    with pytest.raises(ValueError, match=r"config\.json lacks partial_rotary_factor"):
        family_of(hf).check(hf)


def test_the_mtp_layer_of_glm_is_refused_with_a_remedy() -> None:
    hf = tiny_model("glm4_moe") | {"num_nextn_predict_layers": 1}
    with pytest.raises(ValueError, match=r"multiTokenPrediction: needs a deepseek_v3 .* glm4_moe with 1: "):
        family_of(hf).mtp_shapes(hf)
