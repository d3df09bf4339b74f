"""Bytes within a GPU's memory, from the widths of published models."""

import pytest

from grpo_operator.api.catalog.architectures import architecture
from grpo_operator.plan.planner.model.shape import ModelShape
from grpo_operator.plan.planner.training.traffic import activation_bytes, weight_bytes


def test_a_layer_of_grouped_attention_writes_its_tensors_once() -> None:
    model = ModelShape.from_hf(architecture("qwen3-8b"))
    attention = 2 * 128 * (32 + 8)  # queries, keys, values, and the sums of values
    layer = 8 * 4096 + attention + 3 * 12288
    assert activation_bytes(model) == 2 * layer + 4 * 151936 / 36


def test_experts_write_each_token_as_often_as_it_is_routed() -> None:
    config = architecture("deepseek-v3")
    model = ModelShape.from_hf(config)
    doubled = ModelShape.from_hf(config | {"num_experts_per_tok": 16})
    more = 8 * (3 * 2048 + 2 * 7168)  # inside the experts, and sorted by expert and back
    assert activation_bytes(doubled) - activation_bytes(model) == pytest.approx(2 * more * 58 / 61)


def test_gradients_are_read_and_written_in_fp32() -> None:
    assert weight_bytes(1, gradients=False) == 2
    assert weight_bytes(3, gradients=True) == 6 + 8
