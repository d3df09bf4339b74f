"""Mapping between checkpoints and Hugging Face tensors: each tensor once, at the right rows."""

from collections import defaultdict
from typing import Any

import pytest

from grpo_operator.plan.planner.model.shape import KNOWN
from grpo_worker.megatron.conversion.checkpoint_map import MTP_MARK, StoredTensor, stored_tensors
from grpo_worker.megatron.families.base import first_rows
from grpo_worker.megatron.families.registry import family_of
from support.tiny_models import tiny_model

MODELS = sorted({*KNOWN, "qwen3-tied", "llama-tied", "glm4_moe-no-norms", "deepseek_v3-7-layers"})
MTP = tiny_model("deepseek_v3") | {"num_nextn_predict_layers": 1}


def _tensors(hf: dict[str, Any], *keys: str) -> list[StoredTensor]:
    return list(stored_tensors(hf, family_of(hf), keys))


def _by_key(hf: dict[str, Any], *keys: str) -> dict[str, StoredTensor]:
    return {tensor.key: tensor for tensor in _tensors(hf, *keys) if not tensor.index}


def _is_a_partition(hf: dict[str, Any], shapes: dict[str, tuple[int, ...]], *keys: str) -> None:
    """Check that the stored tensors hold each Hugging Face tensor once, and nothing besides."""
    tensors = _tensors(hf, *keys)
    assert len({(tensor.key, tensor.index) for tensor in tensors}) == len(tensors)
    parts = [part for tensor in tensors for part in tensor.parts]
    assert sorted(part.name for part in parts) == sorted(shapes), "each once"
    for part in parts:
        assert part.shape == shapes[part.name]
        assert sum(end - first for first, end in part.rows) == part.shape[0]
    for tensor in tensors:
        spans = sorted(span for part in tensor.parts for span in part.rows)
        ends = [0, *(end for _, end in spans)]
        assert [first for first, _ in spans] == ends[:-1] and ends[-1] == tensor.shape[0]
        assert all(part.shape[1:] == tensor.shape[1:] for part in tensor.parts)


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_of_a_family_is_in_a_checkpoint_once(name: str) -> None:
    hf = tiny_model(name)
    _is_a_partition(hf, family_of(hf).shapes(hf))


def test_the_layer_of_multi_token_prediction_is_there_when_the_checkpoint_has_it() -> None:
    family = family_of(MTP)
    _is_a_partition(MTP, family.shapes(MTP))
    _is_a_partition(MTP, family.shapes(MTP) | family.mtp_shapes(MTP), MTP_MARK)
    found = _by_key(MTP, MTP_MARK)
    (part,) = found["next_tokens.transformer_layer.self_attention.linear_proj.weight"].parts
    assert part.name == f"model.layers.{MTP['num_hidden_layers']}.self_attn.o_proj.weight"
    (norm,) = found["next_tokens.final_layernorm.weight"].parts
    assert norm.name == f"model.layers.{MTP['num_hidden_layers']}.shared_head.norm.weight"


def test_fused_attention_alternates_by_group() -> None:
    """The model has 4 groups of 2 queries, a key and a value with 16 rows each."""
    fused = _by_key(tiny_model("qwen3"))["decoder.layers.1.self_attention.linear_qkv.weight"]
    rows = {part.name.split(".")[-2]: part.rows for part in fused.parts}
    assert rows == {
        "q_proj": ((0, 32), (64, 96), (128, 160), (192, 224)),
        "k_proj": ((32, 48), (96, 112), (160, 176), (224, 240)),
        "v_proj": ((48, 64), (112, 128), (176, 192), (240, 256)),
    }
    assert fused.shape == (256, 64)
    bias = _by_key(tiny_model("qwen2"))["decoder.layers.0.self_attention.linear_qkv.bias"]
    assert [part.name.split(".")[-2:] for part in bias.parts] == [[f"{p}_proj", "bias"] for p in "qkv"]


def test_gate_lies_above_up_and_experts_are_rows_of_one_tensor() -> None:
    hf = tiny_model("deepseek_v3")
    dense = _by_key(hf)["decoder.layers.0.mlp.linear_fc1.weight"]
    assert [(part.name.split(".")[-2], part.rows) for part in dense.parts] == [
        ("gate_proj", ((0, 128),)),
        ("up_proj", ((128, 256),)),
    ]
    experts = defaultdict(list)
    for tensor in _tensors(hf):
        if ".experts.experts.linear_fc2." in tensor.key:
            experts[tensor.key].append((tensor.index, tensor.parts[0].name))
    assert experts["decoder.layers.2.mlp.experts.experts.linear_fc2.weight"] == [
        ((number,), f"model.layers.2.mlp.experts.{number}.down_proj.weight") for number in range(8)
    ]


def test_layers_that_are_alike_may_share_a_tensor() -> None:
    hf, shared = tiny_model("qwen3"), "decoder.layers.mlp.linear_fc2.weight"
    found = [tensor for tensor in _tensors(hf, shared) if "linear_fc2" in tensor.key]
    assert [(tensor.key, tensor.index) for tensor in found] == [(shared, (layer,)) for layer in range(4)]
    _is_a_partition(hf, family_of(hf).shapes(hf), shared)


def test_only_the_vocabulary_may_be_padded() -> None:
    padded = {tensor.key for tensor in _tensors(tiny_model("qwen3_moe")) if tensor.padded}
    assert padded == {"embedding.word_embeddings.weight", "output_layer.weight"}
    assert "output_layer.weight" not in _by_key(tiny_model("qwen3-tied"))


def test_parts_of_a_fused_tensor_begin_where_the_one_before_ends() -> None:
    assert list(first_rows((3, 1, 1), 2)) == [[0, 5], [3, 8], [4, 9]]
    assert list(first_rows((4, 4))) == [[0], [4]]
